"""The wheel: it holds every module and data file, and plans a model outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_cli import CLUSTER, MODEL

ROOT = Path(__file__).parents[1]
SOURCES = ("hap", "profiler", "runtime", "synthesizer", "pyproject.toml", "README.md", "LICENSE")


COMMANDS = """
from hap.cli.commands import main
for line in ("plan net.py --cluster lab.yaml", "verify plan.json", "report plan.json"):
    main(line.split(), standalone_mode=False)
"""
"""In one process, because imports take most of its time."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    copy.mkdir()
    skipped = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(source, copy)
    _run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder,
        copy, cwd=folder,
    )  # fmt: skip
    (made,) = folder.glob("*.whl")
    return made


def _run(*command: str | Path, cwd: Path) -> str:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP"))}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    needed = set()
    for folder, _, names in os.walk(ROOT / "hap", followlinks=True):
        if not folder.endswith("__pycache__"):
            needed |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
    assert not needed - held


@pytest.mark.slow
def test_an_installed_wheel_plans_a_model_elsewhere(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    _run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index",
        wheel, cwd=tmp_path,
    )  # fmt: skip
    own = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    # The dependencies come from the present environment: its folder alone, not its .pth files.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "net.py").write_text(MODEL)
    (elsewhere / "lab.yaml").write_text(CLUSTER)
    where = _run(python, "-c", "import hap; print(hap.__file__)", cwd=elsewhere)
    assert Path(where.strip()).is_relative_to(own)
    hap = tmp_path / "venv" / "bin" / "hap"
    assert "written: new/model.py" in _run(hap, "init", "new", cwd=elsewhere)
    shown = _run(python, "-c", COMMANDS, cwd=elsewhere)
    assert "this plan" in shown
    assert "as on one device, to 1e-09" in shown
    assert "<canvas" in (elsewhere / "plan.html").read_text()
