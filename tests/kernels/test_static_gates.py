"""What the compiler says of the GPU kernels, without a GPU: no spills, budgets kept, the right
instructions. Skips where nvcc is missing, and the machine-code part where cuobjdump is."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
PLANNERS = ("plan_topoep", "plan_joint")
SOURCES = (*PLANNERS, "rows", "transfers")
BUDGET = json.loads((KERNELS / "budget.json").read_text())["kernels"]


def tool(name: str) -> str:
    """The toolkit's program, from PATH or from a wheel's folder; skips when there is none."""
    found = shutil.which(name)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        found = found or shutil.which(name, path=f"{folder}/cu13/bin")
    if not found:
        pytest.skip(f"{name} is not installed: GPU code is not checked")
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, tuple[str, Path]]:
    """{source: (ptxas' report, folder with its .ptx and .cubin)} for sm_90a."""
    nvcc, results = tool("nvcc"), {}
    for source in SOURCES:
        folder = tmp_path_factory.mktemp(source)
        command = [
            nvcc, "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "--keep",
            f"--keep-dir={folder}", "--expt-relaxed-constexpr", "-fmad=false",
            "-Werror=all-warnings", "-Xptxas=-v,-warn-spills,-Werror", f"-I{KERNELS}/include",
            "-o", str(folder / "kernel.cubin"), str(KERNELS / f"csrc/device/{source}.cu"),
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
        assert run.returncode == 0, run.stderr
        results[source] = (run.stderr, folder)
    return results


def functions(report: str) -> list[tuple[str, int, int, int]]:
    """(kernel, registers, static shared bytes, stack bytes) of every entry in ptxas' report."""
    found = []
    for part in report.split("Compiling entry function '")[1:]:
        mangled = part.split("'")[0]
        (name,) = [kernel for kernel in BUDGET if re.search(rf"\d{kernel}[A-Z]", mangled)]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        stack = int(re.search(r"(\d+) bytes stack frame", part)[1])
        found.append((name, registers, int(shared[1]) if shared else 0, stack))
    return found


def test_every_kernel_keeps_its_budget_and_has_no_stack(compiled):
    seen = set()
    for report, _ in compiled.values():
        for name, registers, shared, stack in functions(report):
            assert registers <= BUDGET[name]["registers"], (name, registers)
            assert shared <= BUDGET[name]["shared"], (name, shared)
            assert stack == 0, name
            seen.add(name)
    assert seen == set(BUDGET)


def ptx(compiled, source: str) -> str:
    (path,) = compiled[source][1].glob("*.ptx")
    return path.read_text()


@pytest.mark.parametrize("planner", PLANNERS)
def test_planners_compute_in_integers(compiled, planner):
    assert not re.search(r"\.(f16|bf16|f32|f64)\b", ptx(compiled, planner))


def test_domains_meet_at_cluster_barriers(compiled):
    assert ptx(compiled, "plan_topoep").count("barrier.cluster.arrive") == 2


def test_transfers_use_bulk_copies(compiled):
    text = ptx(compiled, "transfers")
    assert "cp.async.bulk.shared::cluster.global" in text
    assert "cp.async.bulk.global.shared::cta" in text


def test_sums_are_not_contracted(compiled):
    assert not re.search(r"\bfma\.", ptx(compiled, "rows"))


def test_machine_code_copies_in_bulk_and_never_spills(compiled):
    cuobjdump = tool("cuobjdump")
    code = {
        source: subprocess.run(
            [cuobjdump, "-sass", str(folder / "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stdout
        for source, (_, folder) in compiled.items()
    }  # fmt: skip
    assert "UBLKCP.S.G" in code["transfers"]
    assert "UBLKCP.G.S" in code["transfers"]
    for planner in PLANNERS:
        assert "REDUX" in code[planner]
        assert not re.search(r"\b(FADD|FMUL|FFMA|DADD|DMUL|DFMA)\b", code[planner])
    for source, text in code.items():
        assert not re.search(r"\b(LDL|STL)\b", text), source
