"""Recipes: what they resolve to, and one clear message for everything that can be wrong."""

import dataclasses
import math
import shutil
import sys
from pathlib import Path

import pytest
import tomli
import tomli_w

from topoep_titan.titan import device

device.install()

import train
from topoep_titan.errors import InputError
from topoep_titan.models import MODELS
from topoep_titan.titan.job import base_config, load_job, resolved_table
from topoep_titan.titan.layout import check_layout
from topoep_titan.titan.ranges import INSIDE, RANGES, check_ranges
from topoep_titan.titan.run_folder import open_run

RECIPES = Path(__file__).parents[2] / "toml_configs"
TINY = Path(__file__).with_name("tiny.toml")


def write_recipe(folder: Path, text: str) -> Path:
    recipe = folder / "recipe.toml"
    recipe.write_text(f'extends = "{RECIPES}/qwen3_debug.toml"\n{text}')
    return recipe


def test_merge_order_base_recipe_command_line(tmp_path):
    recipe = write_recipe(tmp_path, "[optimizer]\nlr = 0.5\n[topoep]\nreplica_slots = 3\n")
    config = load_job(recipe, ["--topoep.replica-slots", "4"])
    assert config.optimizer.lr == 0.5  # the recipe's own
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.5
    assert config.topoep.replica_slots == 4  # the command line's
    assert config.topoep.ranks_per_node == 2  # of the recipe that it extends
    assert config.model.num_experts == 32  # of the base


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_resolved_recipe_is_a_recipe(path, tmp_path):
    config = load_job(path)
    table = resolved_table(config)
    written = tmp_path / "config.toml"
    written.write_text(tomli_w.dumps(table))
    again = load_job(written)
    assert resolved_table(again) == tomli.loads(written.read_text())
    assert again.optimizer == config.optimizer
    assert again.activation_checkpoint == config.activation_checkpoint


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipe_fits_its_number_of_processes(path):
    config = load_job(path)
    check_layout(config, config.nproc)


@pytest.mark.parametrize(  # Table 1 and section 6.1 of the TopoEP paper
    ("recipe", "layers", "experts", "pipeline", "expert_parallel"),
    [
        ("qwen3_30b_a3b_5l", 5, 128, 1, 32),
        ("glm4_5_air_5l", 5, 128, 2, 16),
        ("deepseek_v2_4l", 4, 160, 2, 16),
    ],
)
def test_reduced_models_of_the_paper(recipe, layers, experts, pipeline, expert_parallel):
    config = load_job(RECIPES / f"{recipe}.toml")
    assert (config.model.n_layers, config.model.num_experts) == (layers, experts)
    assert config.parallelism.pipeline_parallel_degree == pipeline
    assert config.parallelism.expert_parallel_degree == expert_parallel


def test_the_command_line_knows_the_fields_of_the_family():
    config = load_job(
        RECIPES / "deepseek_v2_4l.toml", ["--model.n-layers", "5", "--model.mscale", "1"]
    )
    assert (config.model.n_layers, config.model.mscale, config.model.n_dense_layers) == (5, 1.0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstep = 3", r"unknown key 'training.step'; did you mean 'steps'\?"),
        ("[trainin]\nsteps = 3", r"unknown key 'trainin'; did you mean 'training'\?"),
        (
            "[topoep]\nzzz = 1",
            r"unknown key 'topoep.zzz'; \[topoep\] has: balance_weight, chunks, ",
        ),
        ("[training]\nsteps = 'many'", "'training.steps': expected int, got 'many'"),
        ("[training]\nsteps = true", "'training.steps': expected int, got True"),
        (
            "[topoep]\ndispatcher = 'x'",
            "'topoep.dispatcher': expected one of .*'dedup'.*, got 'x'",
        ),
        ("activation_checkpoint = 'half'", "expected one of selective, full"),
        ("[checkpoint]\ninterval = 0", r"\[checkpoint\]: Checkpoint interval needs"),
        ("base = ['qwen3_debug']", r"base is \['qwen3_debug'\]; choose one of"),
        ("base = 'gpt'", "base is 'gpt'; choose one of: qwen3_debug"),
        ("[training\n", "is not TOML"),
    ],
)
def test_wrong_recipes(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_job(write_recipe(tmp_path, text))


def test_recipes_in_a_circle(tmp_path):
    (tmp_path / "a.toml").write_text("extends = 3")
    with pytest.raises(InputError, match="extends is 3; give the path of one recipe"):
        load_job(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(InputError, match="circle"):
        load_job(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc", "4", "--check"], "on 4 processes; this recipe wants 32 processes"),
        (["--dataloader.dataset-path", "DATA"], "wants 32 processes of "),
    ],
)
def test_a_recipe_of_a_cluster_says_how_many_processes_it_wants(
    monkeypatch, capsys, folder, options, message
):
    monkeypatch.setattr("train.os.sysconf", lambda name: 2**16)  # 4 GiB of memory
    monkeypatch.setattr("train.device.on_cpu", lambda: True)
    options = [str(folder / "data") if option == "DATA" else option for option in options]
    recipe = str(RECIPES / "qwen3_30b_a3b_5l.toml")
    monkeypatch.setattr(sys, "argv", ["train.py", recipe, "--dump-folder", str(folder), *options])
    assert train.main() == 2
    assert message in capsys.readouterr().err


def check(monkeypatch, folder: Path, *arguments: str) -> int:
    settings = ["--dataloader.dataset-path", str(folder / "data"), "--dump-folder", str(folder)]
    settings += ["--training.local-batch-size", "2"]
    argv = ["train.py", str(TINY), "--check", "--nproc", "4", *settings, *arguments]
    monkeypatch.setattr(sys, "argv", argv)
    try:
        return train.main()
    except SystemExit as exit:  # tyro ends the process itself
        return exit.code


PLACED = [
    "--placement.strategy", "correlated", "--topoep.dispatcher", "dedup",
    "--parallelism.expert-parallel-degree", "4",
]  # fmt: skip


BY_LAYERS = ["--parallelism.pipeline-parallel-layers-per-stage"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topoep.planner", "best"], "unknown planner 'best'; choose one of: none, topoep"),
        (["--topoep.replica-slots", "-1"], "topoep.replica_slots is -1; give 0 or more"),
        (["--topoep.transport", "gin"], "'gin' needs a CUDA device"),
        (["--topoep.dispatcher", "deepep"], "needs the deep_ep package (2.0 or later"),
        (["--topoep.balance-weight", "-1"], "topoep.balance_weight is -1; give 0 to 1,000,000"),
        (["--parallelism.pipeline-parallel-degree", "2", "--parallelism.pipeline-parallel-schedule",
          "ZBVZeroBubble"], "is 'ZBVZeroBubble'; choose one of: 1F1B, GPipe"),
        (["--topoep.cluster", "moon"], "cluster 'moon' cannot be read"),
        (["--topoep.router-skew", "-4", "--validator.enable"], "synthetic routing"),
        (["--placement.strategy", "correlated"], 'topoep.dispatcher is "alltoall"'),
        ([*PLACED, "--parallelism.expert-parallel-degree", "1"], "there is nothing to place"),
        ([*PLACED, "--placement.refresh-steps", "0"], "placement.refresh_steps is 0"),
        ([*PLACED, "--placement.node-weight", "-1"], "placement.node_weight is -1"),
        (["--shuffle.enabled"], 'shuffle.enabled needs placement.strategy = "correlated"'),
        ([*PLACED, "--shuffle.enabled"], "needs parallelism.tensor_parallel_degree of at least 2"),
        (["--model.top-k", "9"], "model.top_k (9) must be 1 to the experts in the groups kept"),
        (["--model.n-kv-heads", "3"], "model.n_kv_heads (3) must divide model.n_heads (2)"),
        (["--topoep.router-skew", "-4", "--model.balance", "aux"], "set it to 'none'"),
        (["--checkpoint.enable", "--checkpoint.initial-load-path", "/nowhere"], "is no checkpoint"),
        (["--model.num-experts", "6", "--parallelism.expert-parallel-degree", "4"],
         "model.num_experts (6) must be a multiple of parallelism.expert_parallel_degree (4)"),
        (["--parallelism.expert-parallel-degree", "3"], "(3) must divide data_parallel_shard"),
        (["--parallelism.pipeline-parallel-degree", "3"], "4 processes do not fit the layout"),
        (["--parallelism.context-parallel-degree", "2"], "context parallelism is not supported"),
        (["--compile.enable"], "torch.compile is not supported"),
        (["--training.seq-len", "4096"], "training.seq_len (4096) must be at most"),
        (["--model.vocab-size", "100"], "vocab"),
        (["--training.global-batch-size", "9"], "training.global_batch_size (9)"),
        (["--training.steps", "0"], "training.steps is 0; give 1 or more"),
        (["--profiler.enable-memory-snapshot"], "records a GPU's allocations only"),
        (["--optimizer.lr", "nan"], "optimizer.lr is nan"),
        (["--debug.moe-force-load-balance"], "synthetic routing that no result would name"),
        (["--parallelism.pipeline-parallel-degree", "4"], "2 pipeline microbatches; 4 stages"),
        (["--parallelism.pipeline-parallel-degree", "2", *BY_LAYERS, "1"],
         "2 layers cannot be cut into a pipeline of 2 ranks"),
        (["--model.dim", "6"], "model.dim is 6; experts in float32 need a multiple of 4"),
        (["--topoep.ranks-per-node", "3", "--parallelism.expert-parallel-degree", "2"],
         "topoep.ranks_per_node (3) must divide"),
        (["--profiler.enable-profiling", "--profiler.profile-freq", "3"], "profiler_active (4)"),
        (["--checkpoint.enable", "--checkpoint.load-step", "7"], "there is no such checkpoint"),
        (["--nproc", "0"], "0 processes cannot train; give at least 1; this recipe wants"),
        (["--dump-folder", __file__], "cannot be made"),
        (["--name", "x" * 300], "the name of a run cannot be a folder's (File name too long)"),
        (["--name", "a\nb"], "the name of a run is"),
        (["--name", "../elsewhere"], "give a relative one without '..'"),
        (["--training.stps", "9"], "unknown key --training.stps; did you mean --training.steps?"),
        (["--topoep.replica_slot=9"], "did you mean --topoep.replica-slots?"),
        (["--validator.enable", "False"], "give --validator.enable or --validator.no-enable"),
        (["--training.steps", "many"], "--training.steps: invalid literal for int()"),
    ],
)  # fmt: skip
def test_check_refuses_with_one_message(monkeypatch, capsys, folder, arguments, message):
    assert check(monkeypatch, folder, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "tiny").exists()  # nothing was made


def refused(table: dict) -> str:
    with pytest.raises(InputError) as error:
        check_ranges(table)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("training.global_batch_size", 0, "1 or more, or -1 for the default"),
        ("training.global_batch_size", -5, "1 or more, or -1 for the default"),
        ("training.gc_freq", 0, "1 or more"),
        ("training.max_norm", math.nan, "a finite number"),
        ("parallelism.pipeline_parallel_layers_per_stage", 0, "1 or more"),
        ("validator.freq", 0, "1 or more"),
        ("topoep.balance_weight", 10**12, "0 to 1,000,000"),
        ("topoep.ranks_per_node", 0, "1 or more"),
        ("debug.seed", 10**20 - 1, f"0 to {2**63 - 1:,}"),
        ("model.dim", -4, "1 or more"),
        ("model.dim", 2**31, "1 to 2,147,483,647"),
        ("model.n_heads", -4, "1 or more"),
        ("model.norm_eps", math.nan, "a finite number"),
        ("model.norm_eps", 0.0, "a number above 0"),
        ("model.yarn_factor", 0.5, "1 or more"),
        ("lr_scheduler.warmup_steps", -1, "0 or more"),
        ("lr_scheduler.decay_ratio", 1.5, "0 to 1"),
        ("optimizer.lr", -1.0, "0 or more"),
        ("optimizer.beta1", 2.0, "0 to 0.999999"),
        ("optimizer.eps", -1.0, "0 or more"),
        ("optimizer.weight_decay", math.inf, "a finite number"),
        ("comm.train_timeout_seconds", 0, "1 or more"),
        ("checkpoint.folder", "../../elsewhere", "a path in the run's folder, without '..'"),
        ("metrics.save_tb_folder", "/etc", "a path in the run's folder, without '..'"),
    ],
)
def test_ranges_of_a_recipe(key, value, remedy):
    section, name = key.split(".")
    assert refused({section: {name: value}}) == f"{key} is {value!r}; give {remedy}"


def test_every_range_and_path_is_of_a_key_that_exists():
    """And a number without a range of its own is a count, or any finite one."""
    keys = {
        f"{section.name}.{field.name}"
        for base in MODELS
        for config in [base_config(base, "recipe")]
        for section in dataclasses.fields(config)
        if dataclasses.is_dataclass(getattr(config, section.name))
        for field in dataclasses.fields(getattr(config, section.name))
    }
    assert RANGES.keys() | INSIDE <= keys
    check_ranges({"new": {"count": 1, "float": -0.5, "flag": False, "text": "../x"}})
    assert refused({"new": {"deep": {"count": 0}}}) == "new.deep.count is 0; give 1 or more"


def test_check_finds_missing_and_corrupt_shards(monkeypatch, capsys, folder, tmp_path):
    shutil.copytree(folder / "data", tmp_path / "data")
    assert check(monkeypatch, tmp_path) == 0
    shard = next((tmp_path / "data").glob("train-*.tokens"))
    damaged = bytearray(shard.read_bytes())
    damaged[1000] ^= 1
    shard.write_bytes(damaged)
    assert check(monkeypatch, tmp_path) == 2
    assert shard.name in capsys.readouterr().err
    shard.unlink()
    assert check(monkeypatch, tmp_path) == 2
    assert shard.name in capsys.readouterr().err
    shutil.rmtree(tmp_path / "data")
    assert check(monkeypatch, tmp_path) == 2
    assert "data.prepare" in capsys.readouterr().err


def test_a_folder_of_another_recipe_is_refused(monkeypatch, capsys, folder, tmp_path):
    shutil.copytree(folder / "data", tmp_path / "data")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    assert check(monkeypatch, tmp_path) == 2
    assert "is not a run" in capsys.readouterr().err
    settings = ["--dataloader.dataset-path", str(tmp_path / "data"), "--training.steps", "7"]
    settings += ["--training.local-batch-size", "2"]
    table = resolved_table(load_job(TINY, settings))
    (tmp_path / "tiny" / "config.toml").write_text(tomli_w.dumps(table))
    assert check(monkeypatch, tmp_path) == 2
    assert "'training.steps' was 7, now 20" in capsys.readouterr().err
    (tmp_path / "tiny" / "checkpoint" / "step-7").mkdir(parents=True)
    assert check(monkeypatch, tmp_path, "--training.steps", "20") == 2
    assert "tiny/checkpoint/step-7" in capsys.readouterr().err  # how to train longer
    (tmp_path / "tiny" / "checkpoint" / "step-7").rmdir()
    assert check(monkeypatch, tmp_path, "--training.steps", "7") == 0


def test_one_process_holds_a_run_folder(tmp_path):
    lock = open_run(tmp_path / "run", {"steps": 1})
    with pytest.raises(InputError, match="another process trains there"):
        open_run(tmp_path / "run", {"steps": 1})
    lock.close()
    open_run(tmp_path / "run", {"steps": 1}).close()
