"""The error of spawned ranks that failed: one of them is the cause, others fail because of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from hap.errors import HapError
from hap.runtime.peer_errors import LOST


class RankError(HapError):
    """The error of one rank; it keeps the exit code of the original error."""

    def __init__(self, text: str, rank: int, exit_code: int) -> None:
        super().__init__(text, where=f"rank {rank}")
        self.rank = rank
        self.exit_code = exit_code  # type: ignore[misc]


class RankDiedError(HapError):
    """The process of one rank ended without a word, or hangs."""

    def __init__(self, what: str, rank: int, hint: str, code: int | None = None) -> None:
        super().__init__(what, where=f"rank {rank}", hint=hint)
        self.rank, self.code = rank, code


def failure(
    died: Mapping[int, int],
    raised: Mapping[int, tuple[str, int]],
    late: Sequence[int],
    timeout_s: float | None,
) -> HapError:
    """Return one error for the cause.

    A death comes first, since the rank's peers then raise; those that end as ``LOST`` come last.
    """
    for n, code in died.items():
        if code != LOST:
            return _death(n, code)
    for n, (text, exit_code) in raised.items():
        if exit_code != LOST:
            return RankError(text, n, exit_code)
    hung = [n for n in late if n not in died]
    if hung and (died or raised):
        others = f"; the ranks {', '.join(map(str, hung[1:]))} hang, too" if hung[1:] else ""
        what = f"hangs: it reports nothing while other ranks wait for it{others}"
        hint = "see its output above; ranks that issue different collectives also wait for ever"
        return RankDiedError(what, hung[0], hint)
    for n, (text, exit_code) in raised.items():
        return RankError(text, n, exit_code)
    for n, code in died.items():
        return _death(n, code)
    what = f"no result from rank {', '.join(map(str, late))} after {timeout_s} s"
    return HapError(what, hint="ranks that issue different collectives wait for ever")


def _death(n: int, code: int) -> RankDiedError:
    if code >= 0:
        hint = "see its output above for the reason"
        return RankDiedError(f"exited with code {code} and no result", n, hint, code)
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    hint = "the kernel kills with SIGKILL when memory runs out" if name == "SIGKILL" else ""
    return RankDiedError(f"killed by {name}", n, hint, code)
