"""Checkpoints from the published format to ours and back, and training that goes on from them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.published_cases import CASES, shapes_of, write_folder
from tests.ranks import free_port
from tests.titan.training_cases import train
from topoep_titan.models import load_hf
from topoep_titan.models.hf_config import to_hf_table
from topoep_titan.models.hf_names import places
from topoep_titan.titan.convert import main
from topoep_titan.titan.job import load_job

TINY = Path(__file__).with_name("tiny_glm4_moe.toml")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v2_lite"])
def test_there_and_back_bit_for_bit(case, tmp_path, capsys):
    published = write_folder(tmp_path / "published", CASES[case], shapes_of(case))
    assert main(["hf-to-titan", str(published), str(tmp_path / "titan")]) == 0
    assert main(["titan-to-hf", str(tmp_path / "titan"), str(tmp_path / "back")]) == 0
    assert "read back and equal" in capsys.readouterr().out
    there, back = tensors(published), tensors(tmp_path / "back")
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)
    fields = load_hf(published).config_fields
    assert load_hf(tmp_path / "back").config_fields == fields


def test_bfloat16_export_keeps_the_selection_bias(tmp_path):
    published = write_folder(tmp_path / "published", CASES["glm4_moe"], shapes_of("glm4_moe"))
    main(["hf-to-titan", str(published), str(tmp_path / "titan")])
    out = str(tmp_path / "half")
    assert main(["titan-to-hf", str(tmp_path / "titan"), out, "--dtype", "bfloat16"]) == 0
    there, half = tensors(published), tensors(tmp_path / "half")
    for name, tensor in half.items():
        kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(tensor, there[name].to(kind))


def test_wrong_input_leaves_nothing_behind(tmp_path, capsys):
    published = write_folder(tmp_path / "published", CASES["glm4_moe"], shapes_of("glm4_moe"))
    before = sorted(tmp_path.iterdir())

    def refused(*arguments: str, message: str):
        assert main([str(argument) for argument in arguments]) == 2
        assert message in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before

    out = tmp_path / "out"
    refused("hf-to-titan", published, out, "--recipe", TINY,
            message="(there, here): n_layers: 3, 2; dim: 32, 64")  # fmt: skip
    refused("hf-to-titan", published, published, message="published exists; choose another")
    refused("titan-to-hf", published, out, message="is no checkpoint (no .metadata)")
    table = json.loads((published / "config.json").read_text()) | {"model_type": "mixtral"}
    (published / "config.json").write_text(json.dumps(table))
    refused("hf-to-titan", published, out, message="model_type is 'mixtral'")
    # Damage that only shows while tensors are being written.
    write_folder(published, CASES["glm4_moe"], shapes_of("glm4_moe"))
    main(["hf-to-titan", str(published), str(out)])
    capsys.readouterr()
    (shard,) = out.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-20_000])
    before = sorted(tmp_path.iterdir())
    refused("titan-to-hf", out, tmp_path / "again", message="cannot be read")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A published folder of the size of tiny_glm4_moe.toml."""
    model = load_job(TINY).model
    shapes = {name: place.shape for name, place in places(model).items()}
    folder = tmp_path_factory.mktemp("published") / "glm"
    write_folder(folder, to_hf_table(model), shapes)
    for path in folder.glob("*.safetensors"):  # scaled down: a trained model is calmer
        calm = {name: t / 5 if "norm" not in name else t for name, t in load_file(path).items()}
        save_file(calm, path, {"format": "pt"})
    return folder


@pytest.mark.ranks
def test_training_goes_on_from_either_format_in_any_layout(published, trainers, folder, tmp_path):
    converted = tmp_path / "titan"
    assert main(["hf-to-titan", str(published), str(converted), "--recipe", str(TINY)]) == 0
    common = [
        "--training.steps",
        "4",
        "--checkpoint.enable",
        "--checkpoint.initial-load-model-only",
    ]

    def losses(world: int, *arguments: str) -> list[float]:
        settings = [*common, "--parallelism.expert-parallel-degree", str(min(world, 2)), *arguments]
        port = free_port()
        steps = trainers.run(train, world, port, str(folder), settings, TINY.name)
        (steps,) = [each for each in steps if each is not None]
        assert (folder / f"run-{port}" / "checkpoint" / "step-4" / ".metadata").exists()
        return [step["loss"] for step in steps], folder / f"run-{port}"

    hf = ["--checkpoint.initial-load-in-hf", "--checkpoint.initial-load-path", str(published)]
    one, _ = losses(1, "--checkpoint.initial-load-path", str(converted))
    two, _ = losses(2, *hf, "--training.local-batch-size", "4")
    four, run = losses(
        4, *hf, "--training.local-batch-size", "4", "--parallelism.pipeline-parallel-degree", "2"
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert four == pytest.approx(one, rel=1e-5)

    # What four ranks trained is again a published folder; a run knows its recipe and last step.
    shutil.copy(TINY, run / "config.toml")
    text = (run / "config.toml").read_text().replace("tiny_job", f"{TINY.parent}/tiny_job")
    (run / "config.toml").write_text(text)
    assert main(["titan-to-hf", str(run), str(tmp_path / "trained")]) == 0
    before, after = load_hf(published).state_dict(), load_hf(tmp_path / "trained").state_dict()
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
