"""Discover rules in a process of their own, which an operator may crash. (torch)

On shards of inconsistent tensors, such as indices beyond a shard, a kernel may write out of
bounds. The process is a fork, so that operators of the user's file are registered. Without forks,
as on Windows, nothing is discovered: a spawned process would run the user's program again.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from hap.errors import UnsupportedOpError
from hap.rule_discovery import NoSampleError, discovered
from hap.synthesizer.rules import Call

LIMIT_S = 60.0
"""Time limit of discovery; the number of runs is limited, so only a kernel that hangs
takes so long."""


class InterruptedRunError(NoSampleError):
    """A run took too long, or its process ended: perhaps the machine was busy, or short of memory."""


def discovered_apart(call: Call) -> tuple[str, ...]:
    """Return the rule of a call as lines, by running its operator on small split inputs.

    Raises:
        UnsupportedOpError: as of :func:`hap.rule_discovery.discovered`.
        NoSampleError: the operator runs on no sample, ends its process, or does not end; or this
            platform has no forks.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NoSampleError(
            f"operator {call.node.op}: this platform can't fork a process in which its rule would be "
            "discovered",
            where=call.node.source,
            hint="write its rule in the model file: see docs/rules.md",
        )
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_discover, args=(call, sender), daemon=True)
    process.start()
    sender.close()
    answer: tuple[str, Any] = ("ended", None)
    try:
        if receiver.poll(LIMIT_S):
            answer = receiver.recv()
        else:
            answer = ("late", None)
            process.kill()
    except EOFError:
        pass  # the process ended without an answer
    except BaseException:  # planning is stopped
        process.kill()
        raise
    finally:
        process.join()
        receiver.close()
    match answer:
        case "found", lines:
            return tuple(lines)
        case "refused", (what, where, hint):
            raise UnsupportedOpError(what, where=where, hint=hint)
        case "no sample", what:
            raise NoSampleError(what, where=call.node.source)
        case "late", _:
            reason = f"a run did not end within {LIMIT_S:.0f} s"
        case "failed", text:
            raise AssertionError(f"discovering the rows of {call.node.op} failed:\n{text}")
        case _:
            reason = f"a run on split inputs ended the process (exit code {process.exitcode})"
    raise InterruptedRunError(f"operator {call.node.op}: {reason}", where=call.node.source)


def _discover(call: Call, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills this
    torch.set_num_threads(1)  # a fork lacks its parent's threads
    answer: tuple[str, Any]
    try:
        found = discovered(call)
        came = "discovered" if any(row.units for row in found.rows) else "replicated"
        answer = ("found", (f"origin {came}", *found.lines))
    except NoSampleError as error:
        answer = ("no sample", error.what)
    except UnsupportedOpError as error:
        answer = ("refused", (error.what, error.where, error.hint))
    except Exception:
        answer = ("failed", traceback.format_exc())
    sender.send(answer)
