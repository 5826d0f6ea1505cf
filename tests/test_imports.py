"""Who may import whom: core <- profiler | synthesizer | runtime <- face; planning without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"hap.profiler", "hap.synthesizer", "hap.runtime"}
FACE = {
    "hap",
    "hap.api",
    "hap.chrome_trace",
    "hap.cli",
    "hap.discover",
    "hap.profile_report",
    "hap.profiling",
    "hap.report",
    "hap.rules_text",
    "hap.simulation",
    "hap.terminal",
    "hap.testbed",
    "hap.truth",
    "hap.worker",
}
TORCH = {
    f"hap.{name}"
    for name in (
        "capture",
        "constants",
        "decompositions",
        "losses",
        "model_file",
        "norms",
        "ops",
        "optim",
        "optimizer",
        "torch_private",
    )
}


def _package(module: str) -> str:
    """``hap.runtime`` for all of its modules; a module of the core stands for itself."""
    return ".".join(module.split(".")[:2])


def _imports() -> dict[str, set[str]]:
    """Every module -> the modules that it imports, be it at the top or inside a function."""
    found: dict[str, set[str]] = {}
    for file in sorted(ROOT.glob("hap/*.py")) + sorted(
        f for p in PACKAGES for f in (ROOT / p.removeprefix("hap.")).rglob("*.py")
    ):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(["hap", *(p for p in parts if p not in ("hap", "__init__"))])
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found.setdefault(name, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):  # `from hap import ops` imports hap.ops
                names = [f"hap.{a.name}" for a in node.names] if node.module == "hap" else []
                found.setdefault(name, set()).update(names or [str(node.module)])
    return found


IMPORTS = _imports()


@pytest.mark.parametrize("module", sorted(IMPORTS.keys() - FACE))
def test_imports_run_one_way(module: str) -> None:
    used = {_package(name) for name in IMPORTS[module]}
    assert not used & FACE, "only the face imports the face"
    if _package(module) in PACKAGES:
        assert not used & (PACKAGES - {_package(module)}), "the packages never import one another"
    else:
        assert not used & PACKAGES, "the core imports no package"


@pytest.mark.parametrize(
    "module",
    sorted(m for m in IMPORTS if _package(m) not in TORCH | FACE | {"hap.profiler", "hap.runtime"}),
)
def test_planning_is_pure(module: str) -> None:
    """No torch in graph, plan, ... and the synthesizer, nor in what they import."""
    assert not {name for name in IMPORTS[module] if name.split(".")[0] == "torch"}
    assert not {_package(name) for name in IMPORTS[module]} & TORCH


def _loaded_by(program: str) -> set[str]:
    code = f"import sys\n{program}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_help_loads_nothing_heavy() -> None:
    loaded = _loaded_by("from hap.cli import main\nmain(['--help'], standalone_mode=False)")
    assert "hap.cli" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "rich", "hap.plan", "hap.cluster"}


def test_a_plan_is_read_and_shown_without_torch() -> None:
    loaded = _loaded_by("import hap\nhap.Plan, hap.load_cluster, hap.report")
    assert "hap.report" in loaded
    assert not loaded & {"torch", "numpy"}


def test_the_face_keeps_the_function_plan_apart_from_the_module() -> None:
    loaded = _loaded_by(
        "import hap.plan\nfrom hap.plan import Plan\nimport hap\n"
        "assert hap.Plan is Plan\nassert 'plan' not in vars(hap)"
    )
    assert "hap.plan" in loaded
