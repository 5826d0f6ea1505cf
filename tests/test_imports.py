"""The architecture: one-way imports, planning without torch, unique names, sizes of files.

The docstring of each folder's ``__init__`` states the same rules.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

from hap import cli

ROOT = Path(__file__).parents[1]
HOMES = {"profiler", "synthesizer", "runtime"}

BASE = {"hap.complex_tensors", "hap.errors", "hap.files", "hap.gc_pause", "hap.launchers", "hap.run_log",
        "hap.background", "hap.units"}  # fmt: skip
"""Modules of ``hap`` that import nothing of the product but each other."""

FOLDERS = {
    "hap.cluster": set(),
    "hap.ir": {"hap.cluster"},
    "hap.capture": {"hap.ir", "hap.cluster"},
    "hap.optim": set(),
    "hap.profiler": {"hap.capture", "hap.ir", "hap.cluster"},
    "hap.runtime": {"hap.capture", "hap.ir", "hap.cluster", "hap.optim"},
    "hap.synthesizer": {"hap.ir", "hap.cluster"},
}
"""Folder -> folders that it may import, beside itself and ``BASE``. Other folders may import
everything but ``hap.cli``, which nothing else imports."""

SYNTHESIZER = {
    "rules": set(),
    "cost": {"rules"},
    "search": {"cost", "rules"},
    "shares": {"cost", "rules"},
    "schedule": {"cost", "rules"},
    "bounds": {"search", "cost", "rules"},
}
"""The same inside ``hap.synthesizer``; its own modules may import all of these."""

NO_TORCH = {"hap.cluster", "hap.ir", "hap.synthesizer"}


def _files() -> dict[str, Path]:
    """Return module -> file, of the product and the benchmarks."""
    found = {}
    for folder in ("hap", "benchmarks", *HOMES):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[0] == "hap" and parts[1] in HOMES:
                continue  # a link to a folder at the top
            name = ".".join(p for p in parts if p != "__init__")
            found[f"hap.{name}" if parts[0] in HOMES else name] = file
    return found


FILES = _files()
PRODUCT = sorted(name for name in FILES if name.split(".")[0] == "hap")
TREES = {name: ast.parse(file.read_text()) for name, file in FILES.items()}


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a statement imports; ``from hap.ir import graph``: hap.ir.graph."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from ((name if name in FILES else node.module) for name in names)


IMPORTS = {
    name: {used for node in ast.walk(tree) for used in _imported(node)}
    for name, tree in TREES.items()
}


def _folder(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("module", PRODUCT)
def test_imports_run_one_way(module: str) -> None:
    own = _folder(module)
    used = {_folder(name) for name in IMPORTS[module] if name.split(".")[0] == "hap"}
    if module in BASE:
        assert used <= BASE
    elif own in FOLDERS:
        assert used <= FOLDERS[own] | BASE | {own}
    elif own not in ("hap", "hap.cli", "hap.__main__"):
        assert "hap.cli" not in used, "nothing else imports the commands"
    assert not used & {"benchmarks", "tests"}


@pytest.mark.parametrize("module", [m for m in PRODUCT if m.startswith("hap.synthesizer.")])
def test_imports_run_one_way_inside_the_synthesizer(module: str) -> None:
    own = module.split(".")[2]
    prefix = "hap.synthesizer."
    used = {n.removeprefix(prefix).split(".")[0] for n in IMPORTS[module] if n.startswith(prefix)}
    if own in SYNTHESIZER:
        assert used <= SYNTHESIZER[own] | {own}


@pytest.mark.parametrize("module", [m for m in PRODUCT if _folder(m) in NO_TORCH])
def test_planning_is_pure(module: str) -> None:
    assert "torch" not in {name.split(".")[0] for name in IMPORTS[module]}


def test_there_are_no_import_cycles() -> None:
    """Imports under ``TYPE_CHECKING`` or inside a function count as well."""
    arrows = networkx.DiGraph(
        (module, used) for module, names in IMPORTS.items() for used in names if used in FILES
    )
    faces = [m for m in FILES if FILES[m].name == "__init__.py"]  # these import lazily
    arrows.remove_nodes_from([m for m in faces if m in arrows])
    assert not list(networkx.simple_cycles(arrows))


@pytest.mark.parametrize("module", PRODUCT)
def test_own_modules_are_imported_at_the_top(module: str) -> None:
    """No function imports a module of the product; packages import lazily, by name."""
    inside = [
        used
        for function in ast.walk(TREES[module])
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        for used in _imported(node)
    ]
    assert not [used for used in inside if used.split(".")[0] == "hap"]


def test_no_two_modules_share_a_name() -> None:
    stems = Counter(FILES[m].stem for m in PRODUCT if not FILES[m].stem.startswith("__"))
    assert not {stem: n for stem, n in stems.items() if n > 1}


def test_no_two_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for module in PRODUCT
        for node in TREES[module].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name: n for name, n in names.items() if n > 1}


def test_files_are_of_a_size_to_read() -> None:
    lengths = sorted(len(FILES[m].read_text().splitlines()) for m in PRODUCT)
    assert lengths[len(lengths) // 2] <= 180, "the median file"
    assert lengths[-1] <= 450, "the longest file"
    for folder, most in (("hap.synthesizer.stages", 3_515), ("hap.synthesizer", 15_165)):
        inside = [m for m in PRODUCT if m.startswith(folder)]
        assert sum(len(FILES[m].read_text().splitlines()) for m in inside) <= most, folder


def _loaded_by(program: str) -> set[str]:
    code = f"import sys\n{program}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_help_loads_nothing_heavy() -> None:
    loaded = _loaded_by(
        "from hap.cli.commands import main\nmain(['--help'], standalone_mode=False)"
    )
    assert "hap.cli.commands" in loaded
    heavy = {"torch", "numpy", "pydantic", "rich", "hap.ir.plan", "hap.cluster.topology"}
    assert not loaded & heavy


def test_a_plan_is_read_and_shown_without_torch() -> None:
    loaded = _loaded_by(
        "import hap\nfrom hap import cli\nhap.Plan, hap.load_cluster, cli.plan_screen"
    )
    assert "hap.cli.plan_screen" in loaded
    assert not loaded & {"torch", "numpy"}


def test_the_function_plan_is_no_module() -> None:
    assert not {m for m in FILES if m in ("hap.plan", "hap.compile", "hap.verify")}
    loaded = _loaded_by("from hap.ir.plan import Plan\nimport hap\nassert hap.Plan is Plan")
    assert "hap.ir.plan" in loaded


def test_an_unknown_name_of_the_commands_is_no_attribute() -> None:
    assert not hasattr(cli, "torch")
    assert cli.versions
