"""Write ``reference/*.npz`` from transformers' own code:  python -m tests.models.make_reference

Needs transformers >= 5.24 (DeepSeek-V2 lacked the mscale factor of the softmax scale in older ones,
transformers#47435), which the tests do not.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from tests.models.published_cases import CASES, REFERENCE, token_ids, write_folder


def main() -> None:
    for case, table in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            np.savez_compressed(REFERENCE / f"{case}.npz", **compute(table, Path(folder)))
        print(case, f"{(REFERENCE / f'{case}.npz').stat().st_size:,} bytes")


def compute(table: dict, folder: Path) -> dict[str, np.ndarray]:
    config = transformers.AutoConfig.for_model(**table)
    empty = transformers.AutoModelForCausalLM.from_config(config)
    empty.save_pretrained(folder / "empty")
    shapes = published_shapes(folder / "empty")
    write_folder(folder / "model", table, shapes)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    chosen: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter") or type(module).__name__.endswith(
            "TopkRouter"
        ):
            module.register_forward_hook(lambda module, inputs, output: chosen.append(output[1:]))
    ids = token_ids()
    logits = model(ids).logits
    loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    return {
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        "weights": torch.stack([weights for weights, _ in chosen]).detach().numpy(),
        "experts": torch.stack([experts for _, experts in chosen]).numpy(),
        "gradient_norms": np.array(json.dumps(gradient_norms(model))),
        "shapes": np.array(json.dumps(shapes)),
        "versions": np.array(
            json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
        ),
    }


def published_shapes(folder: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """By published name: transformers keeps all experts of a layer in two parameters."""
    norms = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.double()
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(g.chunk(2) for g in gradient):
                stem = name.removesuffix("gate_up_proj") + str(expert)
                norms[f"{stem}.gate_proj.weight"] = float(gate.norm())
                norms[f"{stem}.up_proj.weight"] = float(up.norm())
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(gradient):
                stem = name.removesuffix("down_proj") + str(expert)
                norms[f"{stem}.down_proj.weight"] = float(down.norm())
        else:
            norms[name] = float(gradient.norm())
    return norms


if __name__ == "__main__":
    main()
