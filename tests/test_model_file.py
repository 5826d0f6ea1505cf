"""Model files: variants, the folder on the path, and mistakes reported with their line."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hap.capture import torch_private
from hap.capture.model_file import load_model_file, model_file_of
from hap.errors import ModelError, PlanError, PlanningStopped, Terminated
from tests.small_plan import small_plan

GOOD = """\
import torch
from torch import nn

def model():
    return nn.Linear(3, 2)

def batch():
    return torch.zeros(4, 3)

def loss(output, batch):
    return output.sum()
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "model.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_plain_file(write: Write) -> None:
    path = write(GOOD)
    file = load_model_file(path)
    assert (file.path, file.function, file.seed) == (path, "model", 0)
    assert isinstance(file.model(), nn.Linear) and file.batch().shape == (4, 3)
    assert file.loss is not None and file.loss(torch.ones(2), None) == 2
    assert file.optimizer is None and file.batches is None


def test_a_variant_has_its_own_functions_or_the_plain_ones(write: Write) -> None:
    variant = """
seed = 7
def batches(): yield batch()
def optimizer(params): return torch.optim.SGD(params, lr=1.0)
def tiny(): return nn.Linear(3, 1)
def tiny_batch(): return torch.zeros(2, 3)
def tiny_optimizer(params): return torch.optim.Adam(params)
"""
    file = load_model_file(f"{write(GOOD + variant)}:tiny")
    assert file.model().out_features == 1 and file.batch().shape == (2, 3)
    assert file.optimizer is not None and file.batches is not None and file.loss is not None
    assert isinstance(file.optimizer(file.model().parameters()), torch.optim.Adam)
    assert next(file.batches()).shape == (4, 3)
    assert file.seed == 7


def test_siblings_are_importable_and_the_path_is_left_as_it_was(write: Write) -> None:
    write("WIDTH = 5\n", "sibling_sizes.py")  # type: ignore[call-arg]
    before = list(sys.path)
    late = "\ndef wide():\n    from sibling_sizes import WIDTH\n    return nn.Linear(3, WIDTH)\n"
    file = load_model_file(
        f"{write('from sibling_sizes import WIDTH' + chr(10) + GOOD + late)}:wide"
    )
    assert file.model().out_features == 5
    assert sys.path == before


def test_a_file_in_a_package_may_import_relatively(tmp_path: Path) -> None:
    inner = tmp_path / "outer_package" / "inner"
    inner.mkdir(parents=True)
    for name, text in {
        "__init__.py": "", "../__init__.py": "", "../sizes.py": "WIDTH = 5\n",
        "nets.py": "from ..sizes import WIDTH\n",
        "main.py": GOOD + "\ndef wide():\n    from .nets import WIDTH\n    return nn.Linear(3, WIDTH)\n"
        "from ..sizes import WIDTH\n",
    }.items():  # fmt: skip
        (inner / name).write_text(text)
    before = list(sys.path)
    assert load_model_file(f"{inner / 'main.py'}:wide").model().out_features == 5
    assert sys.path == before


def test_the_module_is_registered_for_the_tracer_under_a_name_of_its_own(write: Write) -> None:
    names = set(sys.modules)
    load_model_file(write(GOOD))
    (name,) = sys.modules.keys() - names
    assert name.startswith("hap_model_") and name.endswith("_model")
    with pytest.raises(ModelError):
        load_model_file(write("1 / 0"))
    assert name not in sys.modules, "half a module is not left behind"


def test_a_model_file_travels_to_other_processes_as_its_name(write: Write) -> None:
    file = load_model_file(write(GOOD))
    there = pickle.loads(pickle.dumps(file))
    assert (there.path, there.function) == (file.path, file.function)
    assert isinstance(there.model(), nn.Linear)


@pytest.mark.parametrize(
    ("text", "spec", "line", "what"),
    [
        ("x = 1\ny = 1 / 0\n", "", ":2", "the file raised ZeroDivisionError"),
        ("import nowhere_to_be_found\n", "", ":1", "ModuleNotFoundError"),
        ("def model(:\n", "", ":1", "SyntaxError"),
        ("import sys\nsys.exit('no')\n", "", ":2", "SystemExit: no"),
        ("def other(): pass\n", "", "", "no function `model`"),
        (GOOD, ":modle", "", "no function `modle`"),
        ("model = 3\ndef batch(): pass\n", "", "", "`model` is 3, not a function"),
        ("def model(): pass\n", "", "", "no function `batch`"),
        (GOOD + "optimizer = 'Adam'\n", "", "", "`optimizer` is 'Adam', not a function"),
        (GOOD + "seed = 'x'\n", "", "", "`seed` is 'x', not an int"),
        (GOOD + "seed = 2**80\n", "", "", "`seed` has more than 64 bits"),
    ],
)
def test_mistakes_while_loading(write: Write, text: str, spec: str, line: str, what: str) -> None:
    path = write(text)
    with pytest.raises(ModelError) as caught:
        load_model_file(path + spec)
    assert caught.value.where == path + line
    assert what in caught.value.what


@pytest.mark.parametrize("stop", [Terminated, PlanningStopped])
def test_a_signal_in_its_midst_is_no_mistake_of_the_file(
    write: Write, stop: type[BaseException]
) -> None:
    path = write(f"from hap.errors import {stop.__name__}\nraise {stop.__name__}(143)\n")
    with pytest.raises(stop, match="143"):
        load_model_file(path)


def test_a_folder_that_the_file_changes_to_is_its_own(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("5")
    write(f"import os\nos.chdir('data')\n{GOOD}".replace("(4,", "(int(open('rows').read()),"))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # loaded again, as in verify
        file = load_model_file("model.py")
        assert file.batch().shape == (5, 3)
        assert Path.cwd() == tmp_path


def test_a_misspelt_function_is_met_with_the_near_ones(write: Write) -> None:
    with pytest.raises(ModelError) as caught:
        load_model_file(f"{write(GOOD)}:modle")
    assert "the file has model" in caught.value.hint


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file") as caught:
        load_model_file(str(tmp_path / "absent.py"))
    assert caught.value.where == str(tmp_path / "absent.py")


def test_not_a_python_file(write: Write) -> None:
    with pytest.raises(ModelError, match="not a Python file"):
        load_model_file(write("nodes: []", "cluster.yaml"))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "body", "line", "what"),
    [
        ("model", "    return {}\n", 12, "model() returned a dict, not a torch Module"),
        ("model", "    x = 1\n    raise KeyError('k')\n", 14, "model() raised KeyError: 'k'"),
        ("batch", "    return torch.zeros(2) + 'a'\n", 13, "batch() raised TypeError"),
        ("optimizer", "    return None\n", 12, "optimizer() returned a NoneType, not a torch Opt"),
    ],
)
def test_mistakes_while_calling(write: Write, name: str, body: str, line: int, what: str) -> None:
    path = write(f"{GOOD}def {name}(*args):\n{body}")
    file = load_model_file(path)
    with pytest.raises(ModelError) as caught:
        getattr(file, name)()
    assert caught.value.where == f"{path}:{line}"
    assert what in caught.value.what


def test_reading_values_of_fake_tensors_is_left_to_the_caller(write: Write) -> None:
    """Planning first builds on fake tensors, and on real ones if the file reads values."""
    file = load_model_file(
        write(f"{GOOD}def batch():\n    return torch.zeros(int(torch.ones(1)))\n")
    )
    with torch_private.fake_mode(), pytest.raises(torch_private.data_dependent_errors()):
        file.batch()
    assert file.batch().shape == (1,)


def test_a_plan_finds_its_model_file(write: Write) -> None:
    assert model_file_of(small_plan(path=write(GOOD))).function == "model"
    with pytest.raises(PlanError, match="it was made in Python"):
        model_file_of(small_plan(path=""))
    with pytest.raises(PlanError, match="no such file here") as caught:
        model_file_of(small_plan(path="elsewhere/model.py"))
    assert caught.value.where == "elsewhere/model.py"


BATCHES = {
    "returns nothing": ("def batches(): pass", "batches() returned a NoneType, not an iterator"),
    "yields nothing": ("def batches(): yield from ()", "batches() yields no batch"),
    "yields None": ("def batches(): yield None", "batches() yields a NoneType without tensors"),
    "yields an empty dict": ("def batches(): yield {}", "batches() yields a dict without tensors"),
    "raises later": ("def batches():\n    yield batch()\n    1 / 0", "batches() raised ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_without_batches_are_refused(tmp_path: Path, kind: str) -> None:
    """They would otherwise be asked for the next batch for ever."""
    lines, message = BATCHES[kind]
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\ndef model(): return torch.nn.Linear(3, 2)\n"
        f"def batch(): return torch.zeros(4, 3)\n{lines}\n"
    )
    file = load_model_file(str(path))
    assert file.batches is not None
    with pytest.raises(ModelError) as error:
        for _ in range(3):
            list(file.batches())
    assert message in error.value.what and str(path) in error.value.where


def test_batches_start_anew_at_each_call(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\ndef model(): return torch.nn.Linear(3, 2)\n"
        "def batch(): return torch.zeros(4, 3)\ndef batches(): return [batch(), batch()]\n"
    )
    file = load_model_file(str(path))
    assert file.batches is not None
    assert [len(list(file.batches())) for _ in range(2)] == [2, 2]
