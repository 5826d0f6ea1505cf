"""Records of measurements, and the file that they are appended to.

The file has a JSON object per line: first who measured, then a record per operator, link or
collective, as soon as all ranks have it. A run that was cut short leaves whole lines, and at
most one that is not.
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

FORMAT = 4
_MANY = 8  # repeats
MESSAGE = "message"
"""The kind of a record of a message between two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One rank: the machine it is on, what its device calls itself, the memory it may use."""

    node: str
    kind: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The measured ranks and the settings. Records of another header are of another cluster."""

    ranks: tuple[RankInfo, ...]
    quick: bool
    date: str

    def same(self, other: Header) -> bool:
        """The same ranks, asked for the same? Free memory may have changed a little."""
        mine, theirs = ([(r.node, r.kind) for r in h.ranks] for h in (self, other))
        return mine == theirs and self.quick == other.quick


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """An operator on every rank: seconds of a call per window."""

    name: str
    work: Work
    seconds: tuple[tuple[float, ...], ...]

    @property
    def key(self) -> str:
        return f"op/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """A collective among some ranks, or a message between two: seconds until the last has it.

    ``groups`` ran side by side; the slowest counts. ``src`` and ``dst`` are the parts of the
    ranks of a group, where that side is sharded. A message has the kind :data:`MESSAGE`.
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
    """Per rank and window, what computing and communicating side by side do to each other.

    Attributes:
        nbytes: of the all-reduce that ``lost`` and ``drag`` were seen beside.
        lost: the part of its time that computing beside it loses.
        drag: how many times as long a byte of it takes while ranks of that speed compute.
        delay: seconds by which each message is later still, by small ones of several kinds.
    """

    nbytes: int
    lost: tuple[tuple[float, ...], ...]
    drag: tuple[tuple[float, ...], ...]
    delay: tuple[tuple[float, ...], ...]

    key: ClassVar[str] = "beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsRecord:
    """Small and larger collectives among the faster ranks alone, the one group of each."""

    among: tuple[ExchangeRecord, ...]

    key: ClassVar[str] = "starts"


def exchange_key(
    kind: str, how: str, nbytes: int, groups: Sequence[Sequence[int]], skew: str
) -> str:
    """The key by which a resumed run finds an exchange."""
    ranks = "|".join(",".join(map(str, group)) for group in groups)
    return f"{kind}/{how}/{nbytes}/{ranks}/{skew}"


Record = OpRecord | ExchangeRecord | BesideRecord | StartsRecord
Kind = TypeVar("Kind", OpRecord, ExchangeRecord, BesideRecord, StartsRecord)


class Journal:
    """The records of a run, kept in a file as they come.

    Args:
        path: the file; made anew unless it is resumed.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool) -> None:
        self.records: dict[str, Record] = {}
        kept = list(read(path)) if resume and path.exists() else []
        if kept:
            before, records = kept[0], kept[1:]
            if not isinstance(before, Header) or not before.same(header):
                raise InputError(
                    f"{path} was measured by other ranks, or not as thoroughly",
                    hint="profile anew without --resume, or start the same ranks",
                )
            self.records = {r.key: r for r in records if not isinstance(r, Header)}
        text = "".join(line(item) for item in (header, *self.records.values()))
        path.write_text(text)  # without a line that was cut short
        self._file = path.open("a")

    def add(self, record: Record) -> None:
        """Keep a record; it is on disk when this returns."""
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
    """An item as a line of the file."""
    return json.dumps({"is": type(item).__name__, "format": FORMAT, **asdict(item)}) + "\n"


def read(path: Path) -> Iterator[Header | Record]:
    """The items of a file; a last line that was cut short is passed over.

    Raises:
        InputError: another line cannot be read.
    """
    lines = path.read_text().split("\n")
    for number, text in enumerate(lines[:-1], 1):  # what follows the last line break is cut short
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
    if what == "StartsRecord":
        return StartsRecord(among=tuple(_exchange(each) for each in data["among"]))
    kind: type[Record] = {
        "OpRecord": OpRecord, "ExchangeRecord": ExchangeRecord, "BesideRecord": BesideRecord
    }[what]  # fmt: skip
    return kind(**{key: v if key == "work" else _frozen(v) for key, v in data.items()})


def _exchange(data: dict[str, Any]) -> ExchangeRecord:
    return ExchangeRecord(**{key: _frozen(value) for key, value in data.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def spread(seconds: Sequence[float]) -> float:
    """Spread of a few repeats: their median distance from the median, relative to it."""
    middle = median(seconds)
    return median(abs(s - middle) for s in seconds) / middle


def middle(seconds: Sequence[float]) -> float:
    """The mean of repeats without the lowest and the highest fifth.

    A throttled processor pays in one window for what it had too much in another, so that the
    median of a few is off; and a hiccup is no reason to leave the mean as it is.
    """
    ordered = sorted(seconds)
    off = len(ordered) // 5
    return fmean(ordered[off : len(ordered) - off])


def expected(seconds: Sequence[float]) -> float:
    """The mean of repeats that vary as they do in a step, where it is their sum that counts.

    The longest of many is left out, since it may be a hiccup.
    """
    return fmean(sorted(seconds)[: len(seconds) - (len(seconds) >= _MANY)])


def of_kind(
    kind: type[Kind], records: Mapping[str, Record] | Iterable[Header | Record]
) -> list[Kind]:
    """The records of one kind, in their order."""
    values = records.values() if isinstance(records, Mapping) else records
    return [r for r in values if isinstance(r, kind)]
