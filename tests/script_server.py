"""Run scripts on several ranks, as torchrun does, in forks of a process that has imported their libraries.

Each rank of torchrun imports for ten seconds what these scripts use, and trains for one.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO

from hap.runtime.launch import torchrun_variables

LIMIT_S = 300
"""Seconds after which the ranks of a script are killed."""


class ScriptServer:
    """A process that has imported ``modules``; ends with the ``with`` block.

    Args:
        folder: the folder of the scripts, from which they and the server import.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        root = Path(__file__).parents[1]
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.script_server", *modules], cwd=root, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, script: str, arguments: Sequence[str], ranks: int) -> tuple[int, str, str]:
        """Return the first exit status that is not 0, and what all wrote to stdout and stderr.

        Args:
            ranks: 0: one process, as without torchrun.
        """
        job = {"script": str(self._folder / script), "arguments": [*arguments], "ranks": ranks}
        assert self._process.stdin and self._process.stdout
        print(json.dumps(job), file=self._process.stdin, flush=True)
        status, out, error = json.loads(self._process.stdout.readline())
        return status, out, error

    def __enter__(self) -> ScriptServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.communicate()  # closes its input, at which it ends


def serve(modules: Sequence[str]) -> None:
    """Answer each line of stdin, a job, by a line with its result."""
    for name in modules:
        import_module(name)
    signal.signal(signal.SIGALRM, _too_long)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), file=answers, flush=True)


def _run(script: str, arguments: Sequence[str], ranks: int) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        running = set[int]()
        for rank in range(max(ranks, 1)):
            if not (pid := os.fork()):
                _rank(script, arguments, _variables(rank, ranks, port), out, error)
            running.add(pid)
        failed = 0
        signal.alarm(LIMIT_S)
        while running:
            try:
                pid, status = os.wait()
            except TimeoutError:
                failed = failed or signal.SIGALRM
            else:
                running.discard(pid)
                failed = failed or abs(os.waitstatus_to_exitcode(status))
            for other in running if failed else ():  # they may wait for the one that failed
                os.kill(other, signal.SIGKILL)
        signal.alarm(0)
        return failed, _read(out), _read(error)


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank under torchrun; empty without ranks."""
    if not ranks:
        return {}
    alone = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return torchrun_variables(rank, ranks, "127.0.0.1", port) | alone


def _rank(
    script: str,
    arguments: Sequence[str],
    variables: dict[str, str],
    out: IO[bytes],
    error: IO[bytes],
) -> None:
    """Run a script to its end and leave the process."""
    status = 1
    try:
        os.environ.update(variables)
        os.dup2(out.fileno(), 1)
        os.dup2(error.fileno(), 2)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


if __name__ == "__main__":
    serve(sys.argv[1:])
