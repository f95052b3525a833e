"""The import table of the design: each room imports only what its row allows."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# room -> (what it may import besides the standard library and itself)
COMMON = {"topoep_titan.errors", "topoep_titan.files", "topoep_titan.results", "numpy", "tomli"}
PURE = COMMON | {"torch", "scipy", "topoep_kernels"}
ALLOWED = {
    "topoep_titan/cluster": PURE,
    "topoep_titan/planning": PURE | {"topoep_titan.cluster"},
    "topoep_titan/placement": PURE | {"topoep_titan.cluster", "topoep_titan.planning"},
    "topoep_titan/simulator": PURE
    | {"topoep_titan.cluster", "topoep_titan.planning", "topoep_titan.placement"},
    "topoep_titan/execution": COMMON
    | {"torch", "topoep_titan.planning.plan", "topoep_kernels"},
    "topoep_titan/reports": COMMON | {"matplotlib"},
    "kernels/topoep_kernels": {"torch", "numpy"},
    "data": {
        "datasets", "tokenizers", "datasketch", "tiktoken", "numpy", "pyarrow", "tomli",
        "tomli_w", "huggingface_hub",
    },
}  # fmt: skip
# The upper rooms may import every room below, but nobody imports these three.
TOP = ("recipes", "train", "topoep_titan.cli")
ONLY_IN_TITAN = {"torchtitan", "spmd_types"}
PURE_ROOMS = ("cluster", "planning", "placement", "simulator")


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import in the file, function-level ones included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the absolute import"
            found.append((node.lineno, node.module))
    return found


def room_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize("room", ALLOWED)
def test_room_imports_only_its_row(room):
    import sys

    own = room.removeprefix("kernels/").replace("/", ".")
    for path in room_files(room):
        for line, module in imports(path):
            if module.split(".")[0] in sys.stdlib_module_names or under(module, own):
                continue
            assert any(under(module, allowed) for allowed in ALLOWED[room]), (
                f"{path.relative_to(ROOT)}:{line} imports {module}; {room} may import "
                f"{sorted(ALLOWED[room])}"
            )


def test_forbidden_arrows():
    for path in [*room_files("topoep_titan"), *room_files("data"), *room_files("kernels")]:
        relative = path.relative_to(ROOT).as_posix()
        parts = relative.split("/")
        for line, module in imports(path):
            where = f"{relative}:{line} imports {module}"
            if relative != "topoep_titan/cli.py":
                assert not any(under(module, top) for top in TOP), where
            if module.split(".")[0] in ONLY_IN_TITAN:
                assert parts[:2] in (["topoep_titan", "titan"], ["topoep_titan", "models"]), where
            if under(module, "torch.distributed"):
                assert parts[0] == "topoep_titan", where
                assert parts[1] not in PURE_ROOMS, where
                # The only callers below the trainer: of collectives, and to map peers' memory.
                if parts[1] == "execution":
                    assert parts[2] in ("transport.py", "peer_memory.py"), where
            if under(module, "topoep_titan.reports") and parts[1] != "reports":
                assert relative == "topoep_titan/cli.py", where


def test_every_room_says_what_it_is():
    for room in ALLOWED:
        init = ROOT / room / "__init__.py"
        if (ROOT / room).exists():
            assert ast.get_docstring(ast.parse(init.read_text())), f"{room}: one-sentence docstring"
