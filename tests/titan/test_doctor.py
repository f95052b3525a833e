"""``topoep doctor``: memory by arithmetic and as training holds it, and what it refuses."""

import json
import types
from pathlib import Path

import pytest
import torch

from tests.ranks import free_port
from tests.titan.training_cases import held_bytes
from topoep_titan.cli import main
from topoep_titan.errors import InputError
from topoep_titan.execution.buffers import Buffers
from topoep_titan.models import MODELS
from topoep_titan.titan.activations import kept_bytes_of_layer
from topoep_titan.titan.doctor import _device_gib
from topoep_titan.titan.job import load_job
from topoep_titan.titan.machine import machine_report
from topoep_titan.titan.memory import memory_of_ranks
from topoep_titan.titan.probe import cluster_text, measure, write_cluster

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "toml_configs"
TINY = Path(__file__).parent
LAYOUTS = {
    "PP2 x EP2": ["--parallelism.expert-parallel-degree", "2",
                  "--parallelism.pipeline-parallel-degree", "2",
                  "--training.local-batch-size", "4"],
    "TP2 x EP2": ["--parallelism.expert-parallel-degree", "2",
                  "--parallelism.tensor-parallel-degree", "2",
                  "--training.local-batch-size", "4"],
}  # fmt: skip


def test_qwen_on_32_ranks_by_hand():
    """Every dimension divides by 32, so a rank has a 32nd: fp32 parameters, gradients and Adam."""
    config = load_job(RECIPES / "qwen3_30b_a3b_5l.toml")
    (rank,) = memory_of_ranks(config, 32)
    assert rank.parameters == rank.gradients == 4 * 3_737_935_104 // 32
    assert rank.optimizer == 2 * rank.parameters
    # (2 S + E) experts of 6 D F bytes; weights are bf16 in forward, so mains need no copy.
    assert rank.balancing == (2 * 2 + 128) * 6 * 2048 * 768
    weights = torch.empty(4, 768, 2048, dtype=torch.bfloat16, device="meta")
    buffers = Buffers(
        (weights, weights.transpose(1, 2), weights),
        ranks=32, replica_slots=2, compute_dtype=torch.bfloat16, one_sided=False,
    )  # fmt: skip
    assert rank.balancing == buffers.nbytes
    # Embedding and head, 151,936 x 2,048 each (and the final norm), are the largest blocks: both in
    # bf16, and one's gradient in bf16 and as float32 on its way through the reduction.
    embedding = 151_936 * 2048
    assert rank.gathered == 2 * (2 * embedding + 2048) + (2 + 4) * (embedding + 2048)
    assert rank.logits == 4096 * 151_936 * (2 + 4 + 4)


def test_stages_divide_the_model():
    """GLM-4.5-Air with 5 layers on PP 2: the parts of both stages over 16 ranks are the whole."""
    stages = memory_of_ranks(load_job(RECIPES / "glm4_5_air_5l.toml"), 32)
    assert sum(stage.parameters for stage in stages) == 4 * 10_851_043_328 // 16
    assert [stage.logits > 0 for stage in stages] == [False, True]
    # What FSDP keeps whole under a pipeline: bf16 parameters and fp32 gradients of the stage, of
    # which a rank's experts are 8 of 128 and everything else is all of it.
    routed = 4 * 128 * 3 * 4096 * 1408
    others = 10_851_043_328 - routed
    assert sum(stage.gathered for stage in stages) == (2 + 4) * (routed // 16 + others)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_holds_what_was_predicted(trainers, folder, layout):
    arguments = [*LAYOUTS[layout], "--training.steps", "1", "--topoep.planner", "topoep"]
    recipe = "tiny_glm4_moe.toml"
    held = trainers.run(held_bytes, free_port(), str(folder), arguments, recipe)
    stages = memory_of_ranks(load_job(TINY / recipe, arguments), 4)
    for i, stage in enumerate(stages):
        first_of_stage = held[i * len(held) // len(stages)]
        assert (stage.parameters, stage.optimizer, stage.balancing) == first_of_stage


@pytest.mark.parametrize("base", ["qwen3_debug", "glm4_moe_debug", "deepseek_v2_debug"])
def test_activations_are_what_autograd_keeps(base):
    """Counted by autograd on the CPU, whose kernels keep a little more than a GPU's: RMS norms the
    normalised rows; latent attention, whose widths differ, its matrix. Outputs need no copy."""
    model, tokens = MODELS[base](), 64
    model.max_seq_len = tokens
    if hasattr(model, "n_kv_heads"):
        model.n_kv_heads = model.n_heads  # the CPU repeats keys and values
    for layer in (0, 1):
        if base == "deepseek_v2_debug":
            more = model.q_lora_rank + model.kv_lora_rank + model.n_heads * tokens
            more -= model.n_heads * model.v_head_dim
        else:
            query = model.n_heads * model.head_dim
            more = (2 if base == "qwen3_debug" else 0) * query - query
        more += 2 * model.dim
        predicted = tokens * (kept_bytes_of_layer(model, layer, "none", 4) + 4 * more)
        assert predicted == pytest.approx(saved_bytes(model, layer, tokens), rel=0.02)


def saved_bytes(model, layer: int, tokens: int) -> int:
    """Bytes of the storages, parameters apart, that autograd saves in one layer."""
    from topoep_titan.models.hf_model import _build

    built = _build(model, torch.float32).to_empty(device="cpu")
    built.init_weights(buffer_device=torch.device("cpu"))
    own = [*built.parameters(), *built.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes(), storage  # kept: no address comes twice
        return tensor

    x_BLD = torch.randn(1, tokens, model.dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = built.layers[str(layer)](x_BLD, None)
    assert out.requires_grad
    return sum(size for size, _ in saved.values())


def doctor(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["doctor", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_fits_the_device_of_its_cluster(capsys, path):
    code, out, err = doctor(capsys, path, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["job"]["fits"] is True


def test_a_job_that_does_not_fit_is_refused_with_its_largest_terms(capsys):
    recipe = RECIPES / "qwen3_30b_a3b_5l.toml"
    code, out, _ = doctor(capsys, recipe, "--device-memory", "14")
    answer, data = out.splitlines()[:2]  # the answer first, nothing of this machine
    assert (code, answer.split(":")[0], "CPU library" in out) == (0, "fits", False)
    assert data.endswith("outputs/data/corpus is not there; build it: make data")
    code, out, err = doctor(capsys, recipe, "--device-memory", "10")
    assert code == 2
    assert "does NOT fit" in out
    assert "more than the 10.0 GiB of its device (largest: logits, gathered)" in err
    assert doctor(capsys, recipe, "--nproc", "8", "--device-memory", "14")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([RECIPES / "qwen3_debug.toml", "--nproc", "3"], "must divide data_parallel_shard"),
        ([RECIPES / "nothing.toml"], "cannot be read"),
        ([RECIPES / "qwen3_debug.toml", "--topoep.planner", "best"], "unknown planner 'best'"),
        (["--topoep.verify-plan"], "--topoep.verify-plan needs a recipe before it"),
        (["--write-cluster", "/no/such/folder/x.toml"], "give a .toml file in an existing folder"),
    ],
)
def test_wrong_input_is_one_message(capsys, arguments, message):
    code, out, err = doctor(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_machine_says_what_it_lacks_and_why(capsys, monkeypatch):
    def missing():
        raise ImportError("libtopoep_cpu.so is nowhere")

    monkeypatch.setattr("topoep_titan.titan.machine.cpu_library", missing)
    code, out, _ = doctor(capsys)
    assert code == 0
    assert "missing kernels: CPU library: libtopoep_cpu.so is nowhere" in out
    if not torch.cuda.is_available():
        assert "missing transport: gin: needs a CUDA device" in out
        assert "GPUs that map each other's memory: none" in out


def gpus(monkeypatch, peers: dict[int, set[int]], capability=(9, 0)) -> None:
    """A machine with as many 139 GiB GPUs as ``peers`` has keys, as torch.cuda would report it."""

    class Properties:
        name, total_memory = "NVIDIA H200", 139 * 2**30

    accelerator = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(peers))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peers))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b in peers[a])


def test_a_machine_with_gpus(monkeypatch):
    """Two pairs that map each other's memory, and a GPU of its own."""
    gpus(monkeypatch, {0: {2}, 1: {3}, 2: {0}, 3: {1}, 4: set()})
    report = machine_report()
    assert report["devices"] == ["NVIDIA H200, 139.0 GiB"] * 5
    assert report["peer_groups"] == [[0, 2], [1, 3], [4]]
    checks = report["checks"]
    assert checks["float8: linears"]["ok"]
    assert checks["float8: experts"]["ok"]
    assert checks["network: NCCL"]["what"].startswith("NCCL 2.")
    assert (
        "host side" in checks["transport: gin"]["what"]
        or "libtopoep_gin.so" in (checks["transport: gin"]["what"])
    )
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert machine_report()["checks"]["network: NCCL"] == {
        "ok": False, "what": "torch was built without NCCL",
    }  # fmt: skip


def test_memory_is_the_named_clusters_or_this_machines(monkeypatch):
    node = load_job(RECIPES / "qwen3_30b_a3b_5l.toml", ["--topoep.cluster", "h800_4x8"])
    auto = load_job(RECIPES / "qwen3_30b_a3b_5l.toml", ["--topoep.cluster", "auto"])
    gpus(monkeypatch, {0: set()})
    assert _device_gib(node, 32) == 79.1
    assert _device_gib(auto, 32) == 139.0


def test_rates_are_not_measured_with_more_ranks_than_devices(monkeypatch, tmp_path):
    gpus(monkeypatch, {0: {1}, 1: {0}})
    monkeypatch.setattr("topoep_titan.titan.probe.device_type", "cuda")
    for ranks, message in ((3, "this machine has 2 devices"), (1, "at least 2 ranks, not 1")):
        with pytest.raises(InputError, match=message):
            write_cluster(tmp_path / "c.toml", ranks)


def rates_on_two_nodes(rank: int, ranks: int):
    import topoep_titan.titan.probe as probe

    probe.BYTES, probe.REPEATS = 2**18, 3
    return measure(per_node=2)


@pytest.mark.ranks
def test_measured_rates_make_a_cluster_file(four_ranks, tmp_path):
    from topoep_titan.cluster import load_cluster

    results = four_ranks.run(rates_on_two_nodes)
    assert len(set(results)) == 1  # the slowest rank's, known to all
    path = tmp_path / "here.toml"
    path.write_text(cluster_text("here", results[0], nodes=2, per_node=2))
    cluster = load_cluster(path)
    assert (cluster.nodes, cluster.ranks_per_node) == (2, 2)
    assert cluster.bw_far == pytest.approx(results[0].bw_far, rel=0.01)
    assert cluster.lat_near == pytest.approx(results[0].lat_near, rel=0.01)
