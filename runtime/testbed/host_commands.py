"""Run a command on every host, and merge output and exit codes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from hap.errors import InputError, reason_of

_POLL_S = 0.05
_GRACE_S = 1.0  # after a failure: time for the other ranks to print their errors
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def run_commands(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    inside: Callable[[int], AbstractContextManager[None]],
    begun: Callable[[int, int], None],
    on_line: Callable[[str], None],
    end: Callable[[], object],
) -> int:
    """Run a command once per environment, and return the exit code; see ``Testbed.run``.

    Args:
        command: The program and its arguments.
        environments: Environment variables by rank.
        inside: Returns the context in which a rank's process is started.
        begun: Called with (rank, pid) immediately after the start.
        on_line: Called with each line of output, from several threads but never concurrently.
        end: Kills detached child processes of the ranks.
    """
    if not command:
        raise InputError("no command to run", hint="give one after `--`")
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    turn = threading.Lock()
    try:
        for rank, environment in enumerate(environments):
            with inside(rank):
                processes.append(_start(command, environment))
            begun(rank, processes[rank].pid)
            reader = threading.Thread(
                target=_read, args=(rank, processes[rank], on_line, turn), daemon=True
            )
            reader.start()
            readers.append(reader)
        failed = _wait(processes)
        if failed is None:
            return 0
        code = processes[failed].returncode
        with turn:
            on_line(f"[{failed}] ended with code {code}, and all other ranks with it")
        return code if code > 0 else 128 - code
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end()
        for reader in readers:  # a reader ends when no process can write to its pipe
            reader.join(_GRACE_S)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    libc, parent = ctypes.CDLL(None), os.getpid()

    def with_parent() -> None:
        """Make the rank die with this process."""
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,  # killed with all its children, no Ctrl-C of the terminal
            preexec_fn=with_parent,
        )
    except (FileNotFoundError, PermissionError) as error:
        what = f"cannot run {command[0]!r}: {reason_of(error)}"
        raise InputError(what, hint="give a program, then its arguments") from error


def _read(
    rank: int, process: subprocess.Popen[str], on_line: Callable[[str], None], turn: threading.Lock
) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            with turn:
                on_line(f"[{rank}] {line.rstrip()}")


def _wait(processes: Sequence[subprocess.Popen[str]]) -> int | None:
    """Wait until all ranks have ended or one has failed; return the first failed rank, or None."""
    failed, deadline = None, float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            deadline = time.monotonic() + _GRACE_S
        if None not in codes:
            break
        time.sleep(_POLL_S)
    return failed
