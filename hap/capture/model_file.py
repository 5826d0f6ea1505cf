"""The user's model file: Python functions that return a model, a batch and an optimizer. (torch)

``path.py`` takes ``model()``; ``path.py:tiny`` takes ``tiny()``, and with it ``tiny_batch``,
``tiny_loss``, ... where they exist, else ``batch``, ``loss``, ... Every error names
the line of the file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hap.capture import torch_private
from hap.capture.tracing import AUTOCAST
from hap.capture.user_optimizer import MakeOptimizer
from hap.cluster.work import PRECISIONS
from hap.errors import HapError, ModelError, PlanError, PlanningStopped, Terminated
from hap.ir.batch import flatten
from hap.ir.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """The contents of a model file.

    All the callables but ``loss`` (which is traced) raise :class:`ModelError` with the line in
    the file, if the user's code raises or returns a value of a wrong type.

    Attributes:
        path: The file, as given.
        function: Name of the function for ``model``.
        model: Makes the ``nn.Module``.
        batch: Makes one global batch: a tensor, a tuple, or a dict.
        loss: ``loss(output, batch)`` -> scalar; None if the forward returns the loss.
        optimizer: Parameters -> ``torch.optim.Optimizer``; see
            :data:`hap.capture.user_optimizer.MakeOptimizer`.
        autocast: The dtype of automatic mixed precision, or nothing.
        float32_matmul_precision: Of products on GPUs, as torch names it, or nothing.
        batches: Makes an iterator over global batches; with an argument ``start``, from that one on.
        seed: Of torch's generators, before anything random is made.
        rules: Of operators that the table lacks: see :mod:`hap.synthesizer.rules.textual_rules`.
        fixed: Names of batch entries that are the same in every batch.
    """

    path: str
    function: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None
    optimizer: MakeOptimizer | None
    autocast: str
    float32_matmul_precision: str
    batches: Callable[..., Iterator[Any]] | None
    seed: int
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[[str], ModelFile], tuple[str]]:
        return load_model_file, (f"{self.path}:{self.function}",)  # each process loads the file


def load_model_file(spec: str) -> ModelFile:
    """Run the file of ``path.py`` or ``path.py:function`` and look up its definitions.

    Raises:
        ModelError: No such file, Python errors in it, or a name missing or of the wrong kind.
    """
    path, name = _split(spec)
    module = _execute(path)

    def find(suffix: str) -> Any:
        own = suffix if name == "model" else f"{name}_{suffix}"
        return getattr(module, own, getattr(module, suffix, None))

    def function(value: Any, called: str) -> Any:
        if value is not None and not callable(value):
            raise ModelError(
                f"`{called}` is {value!r}, not a function",
                where=path,
                hint=f"write def {called}(...)",
            )
        return value

    if getattr(module, name, None) is None:
        raise ModelError(f"no function `{name}`", where=path, hint=_near(name, module))
    if find("batch") is None:
        raise ModelError(
            "no function `batch`", where=path, hint="define batch(), which returns a global batch"
        )
    seed = find("seed") or 0
    if not isinstance(seed, int):
        raise ModelError(f"`seed` is {seed!r}, not an int", where=path, hint="write seed = 0")
    if not -(2**63) <= seed < 2**64:
        raise ModelError("`seed` has more than 64 bits", where=path, hint="use a smaller number")

    rules = find("rules") or {}
    if not isinstance(rules, dict) or not all(_is_rule(r) for r in rules.items()):
        raise ModelError(
            f"`rules` is {rules!r}", where=path,
            hint='it must be a dict of operators and their lines: {"my.op": ["ab, b -> ab"]}',
        )  # fmt: skip

    fixed = find("fixed") or ()
    if not isinstance(fixed, list | tuple) or not all(isinstance(name, str) for name in fixed):
        raise ModelError(
            f"`fixed` is {fixed!r}", where=path,
            hint='it must be a list of names of batch entries: ["image_grid_thw"]',
        )  # fmt: skip

    def guarded(value: Any, called: str, returns: type = object) -> Any:
        found = function(value, called)
        return None if found is None else _guard(found, called, returns, path)

    return ModelFile(
        path=path,
        function=name,
        model=guarded(getattr(module, name), name, nn.Module),
        batch=guarded(find("batch"), "batch"),
        loss=function(find("loss"), "loss"),
        optimizer=guarded(find("optimizer"), "optimizer", torch.optim.Optimizer),
        autocast=_autocast(find("autocast"), path),
        float32_matmul_precision=_precision(find("float32_matmul_precision"), path),
        batches=_iterated(function(find("batches"), "batches"), path),
        seed=seed,
        rules={
            op: (lines,) if isinstance(lines, str) else tuple(lines) for op, lines in rules.items()
        },
        fixed=tuple(fixed),
    )


def _is_rule(entry: tuple[object, object]) -> bool:
    op, lines = entry
    listed = [lines] if isinstance(lines, str) else lines
    return isinstance(op, str) and isinstance(listed, list | tuple) and all(
        isinstance(line, str) for line in listed
    )  # fmt: skip


def _autocast(value: Any, path: str) -> str:
    """Return ``bfloat16`` or ``float16``, given as text or dtype; an empty text for ``None``."""
    name = str(value or "").removeprefix("torch.")
    if name and name not in AUTOCAST:
        raise ModelError(
            f"`autocast` is {value!r}", where=path, hint=f"use one of {', '.join(AUTOCAST)}"
        )
    return name


def _precision(value: Any, path: str) -> str:
    """Return torch's name of a precision; an empty text for ``None``."""
    if value is not None and value not in PRECISIONS:
        raise ModelError(
            f"`float32_matmul_precision` is {value!r}", where=path,
            hint=f"use one of {', '.join(PRECISIONS)}",
        )  # fmt: skip
    return value or ""


def model_file_of(plan: Plan) -> ModelFile:
    """Return the model file of a plan.

    Raises:
        PlanError: The plan was made through the Python API, without a file, or its path leads to none.
        ModelError: As :func:`load_model_file`.
    """
    if not plan.source.path:
        raise PlanError(
            "the plan names no model file: it was made in Python",
            hint="call hap.compile with the model, or plan a model file: hap plan model.py",
        )
    if not Path(plan.source.path).exists():
        raise PlanError(
            "there is no such file here, and the plan names its model file by this path",
            where=plan.source.path,
            hint="start in the folder in which `hap plan` ran, or put the file back",
        )  # fmt: skip
    return load_model_file(f"{plan.source.path}:{plan.source.function}")


def with_weights(model: nn.Module, file: ModelFile) -> nn.Module:
    """Return the model, or a new one with weights if it is on the meta device."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"{file.function}() returns a model on the meta device, which has no weights",
            where=file.path,
            hint="a plan needs no weights; to verify or train, build the model on the CPU",
        )
    return model


def _split(spec: str) -> tuple[str, str]:
    path, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        return spec, "model"
    return path, name


def _execute(path: str) -> ModuleType:
    file = Path(path.replace("\0", " ")).resolve()
    _LEFT_IN.pop(str(file), None)  # it begins where hap was started
    if not file.is_file():
        raise ModelError("no such file", where=path, hint="give a Python file: model.py")
    own = f"hap_model_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stem}"
    name = ".".join((*_package(file)[1], own))  # its parent resolves relative imports
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ModelError("not a Python file", where=path, hint="give a Python file: model.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # where dynamo looks up the globals of traced functions
    try:
        with _user_code(path, "the file"):
            found.loader.exec_module(module)
    except ModelError:
        del sys.modules[name]
        raise
    return module


def _package(file: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder that holds the file's package, and the package's names; no name without one.

    A folder is a package if it has an ``__init__.py``, and so on upwards.
    """
    root = file.parent
    names: tuple[str, ...] = ()
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        root, names = root.parent, (root.name, *names)
    return root, names


def _guard(function: Callable[..., Any], name: str, returns: type, path: str) -> Any:
    """Return ``function`` with errors that name the line, and with a check of its result."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _user_code(path, f"{name}()"):
            result = function(*args)
        if not isinstance(result, returns):
            what = f"{name}() returned a {type(result).__name__}, not a torch {returns.__name__}"
            code = getattr(function, "__code__", None)
            where = f"{path}:{code.co_firstlineno}" if code else path
            raise ModelError(what, where=where, hint=f"return a torch {returns.__name__}")
        return result

    return call


def _iterated(
    function: Callable[..., Any] | None, path: str
) -> Callable[..., Iterator[Any]] | None:
    """Return ``batches`` with errors that name the line, and with a check of each batch."""
    if function is None:
        return None
    made, code = function, getattr(function, "__code__", None)
    where = f"{path}:{code.co_firstlineno}" if code else path

    @functools.wraps(made)
    def call(*args: Any) -> Iterator[Any]:
        with _user_code(path, "batches()"):
            found = made(*args)
        if not hasattr(found, "__iter__"):
            what = f"batches() returned a {type(found).__name__}, not an iterator over batches"
            raise ModelError(
                what, where=where, hint="yield global batches, as batch() returns them"
            )
        with _user_code(path, "batches()"):
            entries = iter(found)
        for number in itertools.count():
            with _user_code(path, "batches()"):
                batch = next(entries, _END)
            if batch is _END and number:
                return
            if batch is _END or not _has_tensors(batch):
                kind = "no batch" if batch is _END else f"a {type(batch).__name__} without tensors"
                raise ModelError(
                    f"batches() yields {kind}", where=where,
                    hint="yield global batches, as batch() returns them; each call must begin anew",
                )  # fmt: skip
            yield batch

    return call


_END = object()


def _has_tensors(batch: Any) -> bool:
    try:
        return bool(flatten(batch))
    except ModelError:
        return False


@contextlib.contextmanager
def _user_code(path: str, what: str) -> Iterator[None]:
    """Run the file's code like ``python path``, with its folder first on ``sys.path``.

    The folder of its package follows, so that relative imports find the package.
    """
    file = Path(path).resolve()
    folders = dict.fromkeys((str(file.parent), str(_package(file)[0])))
    sys.path[:0] = folders
    try:
        with _current_folder(str(file)):
            yield
    except (HapError, Terminated, PlanningStopped, KeyboardInterrupt):
        raise
    except torch_private.data_dependent_errors():
        raise  # under fake tensors: the caller builds for real instead
    except BaseException as error:
        summary = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ModelError(
            f"{what} raised {summary}",
            where=_line(error, path),
            hint="run the file with python to see the whole traceback, or repeat with -v",
        ) from error
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):  # the code may have removed it itself
                sys.path.remove(folder)


_LEFT_IN: dict[str, str] = {}
"""Model file -> the current folder that its code changed to, for its next functions."""


@contextlib.contextmanager
def _current_folder(file: str) -> Iterator[None]:
    """Run the file's code in the folder that it changed to, if it did; come back from there."""
    try:
        before = os.getcwd()
    except FileNotFoundError:  # it was removed
        yield
        return
    inside = _LEFT_IN.get(file, before)
    try:
        if inside != before:
            os.chdir(inside)
        yield
    finally:
        after = os.getcwd()
        if after != before:
            _LEFT_IN[file] = after
            os.chdir(before)


def _line(error: BaseException, path: str) -> str:
    """Return ``path:line``: the deepest line of the file in the traceback, or a syntax error's."""
    file = str(Path(path).resolve())
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{path}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{path}:{lines[-1]}" if lines else path


def _near(name: str, module: ModuleType) -> str:
    """Return a suggestion of similarly named functions of the file."""
    own = [
        key for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]  # fmt: skip
    near = get_close_matches(name, own, n=3) or own[:6]
    return f"define {name}()" + (f"; the file has {', '.join(near)}" if near else "")
