"""A hostile case, and the run of the command line that judges it."""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from click.testing import CliRunner

from benchmarks.time_limit import TooLongError, limited
from hap.cli.answers import UNEXPECTED
from hap.cli.commands import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def model():
    return Net()

def batch():
    return torch.zeros(8, 16)

def loss(output, batch):
    return (output - batch).square().mean()
"""
"""A model file without any fault; faults are appended or replace a part."""

CLUSTER = """
name: lab
links:
  between: {bandwidth: 10 Gbit/s, latency: 20 us}
nodes:
- {name: a, gpus: 2, type: A100}
- {name: b, gpus: 1, type: P100, memory: 8 GiB}
- {name: c, gpus: 1, type: cpu, memory: 4 GiB, flops: 40 GFLOP/s, memory_bandwidth: 8 GB/s}
"""

SECONDS = 60
"""Limit of a case, of processor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Files of a folder and a command that runs in it.

    Attributes:
        kind: the class of input: ``model``, ``cluster``, ``plan`` or ``command``.
        name: unique within its kind.
        argv: arguments of ``hap``; the folder is the current one.
        files: texts, or bytes, by path.
        says: words that the error must contain; empty: any error, or success, is right.
        exits: right exit codes.
    """

    kind: str
    name: str
    argv: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    exits: tuple[int, ...] = (2,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``problem`` is empty if the answer to the case is right."""

    case: Case
    code: int
    message: str
    problem: str


def run(case: Case, folder: Path) -> Outcome:
    """Run a case in an empty folder."""
    folder.mkdir(parents=True)
    for name, content in {
        "model.py": MODEL,
        "cluster.yaml": CLUSTER,
        "folder/file": "",
        **case.files,
    }.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.mkfifo(folder / "pipe")
    code, message, problem = -1, "", ""
    with contextlib.chdir(folder):
        try:
            with limited(SECONDS), contextlib.redirect_stdout(io.StringIO()):
                result = CliRunner().invoke(main, list(case.argv))
            code, message = result.exit_code, result.stderr
            if result.exception and not isinstance(result.exception, SystemExit):
                problem = "".join(traceback.format_exception(result.exception)[-4:])
        except TooLongError:
            problem = f"no answer in {SECONDS} processor seconds"
        except BaseException as error:  # user code may raise any
            if isinstance(error, KeyboardInterrupt):
                raise
            problem = "".join(traceback.format_exception(error)[-2:])
    return Outcome(
        case=case, code=code, message=message, problem=problem or _judge(case, code, message)
    )


def _judge(case: Case, code: int, message: str) -> str:
    """Return the reason why an answer is wrong, or an empty text."""
    if "Traceback" in message:
        return "a traceback"
    if UNEXPECTED in message:
        return "an error that nobody expected"
    if code not in case.exits:
        return f"exit {code}, not {' or '.join(map(str, case.exits))}"
    lines = [x for x in message.splitlines() if x.lower().startswith(("error", "usage"))]
    if code and not lines:
        return "no error is told"
    missing = [word for word in case.says if word.lower() not in message.lower()]
    if code and missing:
        return f"the message lacks {missing}"
    return ""
