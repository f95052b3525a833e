"""A cluster: nodes (NVLink domains) of ranks, and the rate of each link class, read from TOML."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from topoep_titan.errors import InputError

RATES = (1e6, 1e18)  # of flops and bandwidths: modelled picoseconds stay inside int64
LONGEST = 1e9  # of latencies and plan_us, for the same reason
CLUSTER_FOLDER = Path(__file__).resolve().parents[2] / "toml_configs" / "clusters"


@dataclass(frozen=True)
class Cluster:
    """Ranks 0..R-1 in order, ``ranks_per_node`` to a node. A node is one NVLink domain."""

    name: str
    nodes: int
    ranks_per_node: int
    flops: float  # achieved bf16 FLOP/s of one rank in a grouped matmul
    bw_far: float  # bytes/s that one rank sends (and receives) across nodes
    bw_near: float  # bytes/s that one rank sends (and receives) within its node
    lat_far: float  # seconds
    lat_near: float  # seconds
    plan_us: float  # charged once for a plan that holds a replica

    def __post_init__(self):
        for field in ("nodes", "ranks_per_node"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"cluster {self.name!r}: {field} is {value!r}; give an integer of at least 1"
                )
        for field in ("flops", "bw_far", "bw_near"):
            if not RATES[0] <= getattr(self, field) <= RATES[1]:
                raise InputError(
                    f"cluster {self.name!r}: {field} is {getattr(self, field)!r}; "
                    f"give a rate per second from {RATES[0]:g} to {RATES[1]:g}"
                )
        for field in ("lat_far", "lat_near", "plan_us"):
            if not 0 <= getattr(self, field) <= LONGEST:
                raise InputError(
                    f"cluster {self.name!r}: {field} is {getattr(self, field)!r}; "
                    f"give a number from 0 to {LONGEST:g}"
                )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def resized(self, ranks: int, ranks_per_node: int | None = None) -> "Cluster":
        """The same links for a group of ``ranks``; ``nodes`` follows.

        Without ``ranks_per_node`` the file's value is kept, or ``ranks`` when that is smaller.
        Raises InputError when the ranks do not fill whole nodes (domains are of equal size).
        """
        per_node = ranks_per_node or min(self.ranks_per_node, ranks)
        if ranks < 1 or per_node < 1 or ranks % per_node:
            raise InputError(
                f"{ranks} ranks do not fill nodes of {per_node}; "
                "choose ranks_per_node so that it divides the number of ranks"
            )
        return dataclasses.replace(self, nodes=ranks // per_node, ranks_per_node=per_node)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Read ``toml_configs/clusters/<name>.toml``, or the file at a path that ends in .toml.

    Raises InputError for an unknown name, an unreadable file, and missing or unknown keys.
    """
    path, table = read_named_toml("cluster", name_or_path, CLUSTER_FOLDER)
    fields = {field.name for field in dataclasses.fields(Cluster)}
    for word, keys in (("unknown", table.keys() - fields), ("missing", fields - table.keys())):
        if keys:
            raise InputError(
                f"cluster file {path}: {word} {', '.join(sorted(keys))}; "
                f"a cluster has exactly: {', '.join(f.name for f in dataclasses.fields(Cluster))}"
            )
    for field in dataclasses.fields(Cluster):
        value, expected = table[field.name], field.type
        good = isinstance(value, (int, float) if expected is float else expected)
        if not good or isinstance(value, bool):
            raise InputError(
                f"cluster file {path}: {field.name} is {value!r}; expected {expected.__name__}"
            )
    return Cluster(**table)


def read_named_toml(
    kind: str, name_or_path: str | Path, folder: Path
) -> tuple[Path, dict[str, Any]]:
    """``folder/<name>.toml``, or the file at a path that ends in .toml, and what it holds.

    Raises InputError, with the names that ``folder`` has, when it cannot be read as TOML.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = folder / f"{name_or_path}.toml"
    try:
        return path, tomli.loads(path.read_text())
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml")))
        raise InputError(
            f"{kind} {str(name_or_path)!r} cannot be read ({error.strerror}); "
            f"give a .toml file or one of: {known}"
        ) from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{kind} file {path}: {error}") from None
