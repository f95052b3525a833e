"""The two execution backends: as ideal as the closed form, or as slow as a machine was measured.

A calibration is a TOML file with the constants of the ``[plain]`` and the ``[chunked]`` backend,
each with its derivation. It multiplies a cluster's rates inside the simulator and changes no file.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

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
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = CALIBRATION_FOLDER / f"{name_or_path}.toml"
    try:
        table = tomli.loads(path.read_text())
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in CALIBRATION_FOLDER.glob("*.toml")))
        raise InputError(
            f"calibration {str(name_or_path)!r} cannot be read ({error.strerror}); give a .toml "
            f"file or one of: {known}"
        ) from None
    except tomli.TOMLDecodeError as error:
        raise InputError(f"calibration file {path}: {error}") from None
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
