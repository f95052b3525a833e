"""The two execution backends: as ideal as the closed form, or as slow as a machine was measured.

A calibration is a TOML file with the constants of the ``[plain]`` and the ``[chunked]`` backend,
each with its derivation. It multiplies a cluster's rates inside the simulator and changes no file.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topoep_titan.cluster.topology import read_named_toml
from topoep_titan.errors import InputError
from topoep_titan.simulator.layer import Backend

CALIBRATION_FOLDER = Path(__file__).resolve().parents[2] / "toml_configs" / "calibrations"
CONSTANTS = tuple(
    f.name for f in dataclasses.fields(Backend) if f.default is not dataclasses.MISSING
)


@dataclass(frozen=True)
class Backends:
    plain: Backend  # one chunk, a row per assignment: the paper's Megatron-LM baseline
    chunked: Backend  # two chunks, rows deduplicated by node and rank: ours, and the paper's


def backends(calibration: str | Path | None = None) -> Backends:
    """Ideal ones, or those of ``toml_configs/calibrations/<name>.toml`` or of a .toml path.

    Raises InputError for a file that cannot be read, and for a key that is no constant.
    """
    table = {} if calibration is None else _read(calibration)
    return Backends(
        plain=Backend("plain", dispatcher="alltoall", chunks=1, **table.get("plain", {})),
        chunked=Backend("chunked", dispatcher="dedup-node", chunks=2, **table.get("chunked", {})),
    )


def _read(name_or_path: str | Path) -> dict[str, dict[str, Any]]:
    path, table = read_named_toml("calibration", name_or_path, CALIBRATION_FOLDER)
    for backend, constants in table.items():
        if backend not in ("plain", "chunked") or not isinstance(constants, dict):
            raise InputError(
                f"calibration file {path}: unknown {backend}; it has [plain] and [chunked]"
            )
        for key, value in constants.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if key not in CONSTANTS or not number or not value >= 0:
                raise InputError(
                    f"calibration file {path}: [{backend}] {key} = {value!r}; give a number of at "
                    f"least 0 for one of: {', '.join(CONSTANTS)}"
                )
    return table
