"""Records of measurements, and the file to which they are appended.

The file has a JSON object per line: first the header, then a record per operator, link or
collective, as soon as all ranks have measured it. An interrupted run leaves complete lines, and at
most one incomplete line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar, Self, TypeVar

from hap.cluster.work import Work
from hap.errors import InputError
from hap.files import write_whole

FORMAT = 5
_MANY = 8  # repeats
MESSAGE = "message"
"""The kind of a record of a message between two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One rank: its machine, the name that its device reports, and the memory that it may use."""

    node: str
    kind: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The measured ranks and the settings. A run resumes only records with the same header."""

    ranks: tuple[RankInfo, ...]
    quick: bool
    date: str

    def same(self, other: Header) -> bool:
        """Return whether ranks and settings are equal; free memory may differ."""
        mine, theirs = ([(r.node, r.kind) for r in h.ranks] for h in (self, other))
        return mine == theirs and self.quick == other.quick


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """An operator on every rank: seconds of a call, by rank and window."""

    name: str
    work: Work
    seconds: tuple[tuple[float, ...], ...]

    @property
    def key(self) -> str:
        return f"op/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """A collective among some ranks, or a message between two: seconds until the last rank is done.

    ``groups`` run in parallel; the slowest counts. ``src`` and ``dst``: the ranks' fractions of the
    tensor before and after, all 1 if it is not sharded. A message has the kind :data:`MESSAGE`.
    """

    kind: str
    how: str
    nbytes: int
    groups: tuple[tuple[int, ...], ...]
    src: tuple[float, ...]
    dst: tuple[float, ...]
    skew: str
    seconds: tuple[float, ...]

    @property
    def key(self) -> str:
        return exchange_key(self.kind, self.how, self.nbytes, self.groups, self.skew)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideRecord:
    """Contention between computing and communication, by rank and window.

    Attributes:
        nbytes: bytes of the all-reduce that measures ``lost`` and ``drag``.
        lost: time that computing loses, as a fraction of the all-reduce's time.
        drag: slowdown of the all-reduce's bytes while ranks of that speed compute.
        delay: additional seconds per message, measured with small collectives of several kinds.
    """

    nbytes: int
    lost: tuple[tuple[float, ...], ...]
    drag: tuple[tuple[float, ...], ...]
    delay: tuple[tuple[float, ...], ...]

    key: ClassVar[str] = "beside"


def exchange_key(
    kind: str, how: str, nbytes: int, groups: Sequence[Sequence[int]], skew: str
) -> str:
    """Return the key by which a resumed run finds an exchange."""
    ranks = "|".join(",".join(map(str, group)) for group in groups)
    return f"{kind}/{how}/{nbytes}/{ranks}/{skew}"


Record = OpRecord | ExchangeRecord | BesideRecord
Kind = TypeVar("Kind", OpRecord, ExchangeRecord, BesideRecord)


class Journal:
    """The records of a run; each is written to a file as it is added.

    Args:
        path: the file; it is overwritten unless the run resumes it.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool) -> None:
        self.records: dict[str, Record] = {}
        kept = list(read(path)) if resume and path.exists() else []
        if kept:
            before, records = kept[0], kept[1:]
            if not isinstance(before, Header) or not before.same(header):
                raise InputError(
                    f"{path} was measured by other ranks, or with another --quick",
                    hint="profile anew without --resume, or start the same ranks",
                )
            self.records = {r.key: r for r in records if not isinstance(r, Header)}
        text = "".join(line(item) for item in (header, *self.records.values()))
        write_whole(path, [text])  # without an incomplete last line
        self._file = path.open("a")

    def add(self, record: Record) -> None:
        """Add a record; it is on disk when this returns."""
        self.records[record.key] = record
        self._file.write(line(record))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def line(item: Header | Record) -> str:
    """Return an item as a line of the file."""
    return json.dumps({"is": type(item).__name__, "format": FORMAT, **asdict(item)}) + "\n"


def read(path: Path) -> Iterator[Header | Record]:
    """Yield the items of a file, except an incomplete last line.

    Raises:
        InputError: another line cannot be read.
    """
    lines = path.read_text().split("\n")
    for number, text in enumerate(lines[:-1], 1):  # text after the last line break is incomplete
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise KeyError("format")
            yield _item(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"cannot read a sample: {error!r}", where=f"{path}:{number}",
                hint="profile anew without --resume",
            ) from error  # fmt: skip


def _item(data: dict[str, Any]) -> Header | Record:
    what = data.pop("is")
    if what == "Header":
        ranks = tuple(RankInfo(**rank) for rank in data.pop("ranks"))
        return Header(ranks=ranks, **data)
    if what == "OpRecord":
        data["work"] = Work(*data["work"])
    kind: type[Record] = {
        "OpRecord": OpRecord, "ExchangeRecord": ExchangeRecord, "BesideRecord": BesideRecord
    }[what]  # fmt: skip
    return kind(**{key: v if key == "work" else _frozen(v) for key, v in data.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def spread(seconds: Sequence[float]) -> float:
    """Return the relative spread of repeats: the median absolute deviation over the median."""
    middle = median(seconds)
    return median(abs(s - middle) for s in seconds) / middle


def middle(seconds: Sequence[float]) -> float:
    """Return the mean of repeats without the lowest and the highest fifth.

    A throttled processor has less time in a window after it had too much in another, so that the
    median of few windows is biased; the plain mean includes hiccups.
    """
    ordered = sorted(seconds)
    off = len(ordered) // 5
    return fmean(ordered[off : len(ordered) - off])


def expected(seconds: Sequence[float]) -> float:
    """Return the mean of repeats that vary as in a step, where their sum counts.

    The longest of many is left out, since it may be a hiccup.
    """
    return fmean(sorted(seconds)[: len(seconds) - (len(seconds) >= _MANY)])


def of_kind(
    kind: type[Kind], records: Mapping[str, Record] | Iterable[Header | Record]
) -> list[Kind]:
    """Return the records of one kind, in their order."""
    values = records.values() if isinstance(records, Mapping) else records
    return [r for r in values if isinstance(r, kind)]
