"""Interned cost tables (hash-consing), so that work on equal tables is done once.

The layers of a model repeat, and so do the tables of its labelling problem (Ershov, "On programming
of arithmetic operations", 1958).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.int64]
Labels = npt.NDArray[np.signedinteger[Any]]

FORBIDDEN = 1 << 55
"""Cost of forbidden entries; sums of up to 128 of them stay within 64 bits."""

CAP = FORBIDDEN >> 8
"""Cost (140 s) up to which dominance is computed exactly; not claimed beyond it."""

COMPARED = 1 << 20
"""Limit of entries of compared tables; comparing larger ones for equality takes too long."""

HELD = 1 << 28
"""Limit of entries of all cached large tables: 2 GiB."""

_GONE: Costs = np.zeros(0, dtype=np.int64)


@functools.lru_cache(maxsize=256)
def _pairs_of_labels(count: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return ``[a, b]``: whether these are two labels, and whether b is the earlier one."""
    return ~np.eye(count, dtype=np.bool_), np.tri(count, k=-1, dtype=np.bool_)


class Pool:
    """Tables of one problem. Every given or computed table has a number."""

    def __init__(self) -> None:
        self.tables: list[Costs] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._given: dict[
            int, tuple[int, Costs]
        ] = {}  # keeps the array, so that its id stays unique
        self._made: dict[object, int] = {}
        self._kept: dict[object, tuple[int, ...]] = {}
        self._minima: dict[object, tuple[int, int, Labels]] = {}
        self._held = 0
        self._passing: set[int] = set()

    def holds(self, entries: int) -> bool:
        """Return whether there is room for another table of this size, and its derived tables."""
        if entries <= COMPARED:
            return True
        self._held += entries
        return self._held <= HELD

    def passing(self, table: Costs) -> int:
        """Return a number for a table that is read once, and then released."""
        self._passing.add(len(self.tables))
        self.tables.append(table)
        return len(self.tables) - 1

    def release(self, number: int) -> None:
        """Free a table that was passing; others stay."""
        if number in self._passing:
            self._passing.remove(number)
            self.tables[number] = _GONE

    def number(self, table: Costs) -> int:
        """Return the number of a table, the same for equal ones."""
        given = self._given.get(id(table))
        if given is not None:
            return given[0]
        key = (table.shape, table.tobytes() if table.size <= COMPARED else b"")
        number = self._numbers.get(key) if key[1] else None
        if number is None:
            number = len(self.tables)
            self.tables.append(table)
            if key[1]:
                self._numbers[key] = number
        self._given[id(table)] = number, table
        return number

    def _once(self, key: object, make: Callable[[], Costs]) -> int:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self.number(make())
        return found

    def turned(self, number: int) -> int:
        """Return the transpose of a pair's table."""
        return self._once((number, "turned"), lambda: np.require(self.tables[number].T, None, "C"))

    def taken(self, number: int, labels: tuple[int, ...]) -> int:
        """Return the table with only these labels of its first variable."""
        return self._once((number, labels), lambda: self.tables[number][list(labels)])

    def row(self, number: int) -> int:
        """Return the only row of a table whose first variable has one label."""
        return self._once((number, "row"), lambda: self.tables[number][0])

    def added(self, a: int, b: int) -> int:
        """Return the sum of two tables."""
        key = (a, b, "added") if a < b else (b, a, "added")
        return self._once(key, lambda: np.minimum(self.tables[a] + self.tables[b], FORBIDDEN))

    def minimum(self, costs: int, pairs: tuple[int, ...]) -> tuple[int, int, Labels]:
        """Return the sum of tables that begin with one variable, minimised over it.

        Returns:
            Its least entry, the number of its table less this, so that tables of layers repeat, and
            the first best label.
        """
        key = (costs, pairs)
        found = self._minima.get(key)
        if found is None:
            total = self.tables[costs]
            for n in pairs:
                table = self.tables[n]
                total = total[..., None] + table.reshape(len(table), *[1] * (total.ndim - 1), -1)
            best = total.min(axis=0)
            least = int(best.min())
            rest = np.where(best >= FORBIDDEN, FORBIDDEN, best - least)
            found = self._minima[key] = least, self.number(rest), total.argmin(axis=0)
        return found

    def undominated(self, costs: int, pairs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the labels of a variable that some labelling may need, in order.

        Label a is removed if another one, b, costs at most as much under all labels of the
        neighbours: the gaps ``min over x of T[a, x] - T[b, x]``, summed over all its tables, are 0
        or more (Goldstein, "Efficient rotamer elimination", 1994). No label is removed for a later one
        that may cost the same under all: the first of equals stays.
        """
        key = (costs, pairs)
        found = self._kept.get(key)
        if found is None:
            gaps = [self.tables[self._gaps(n)] for n in (costs, *pairs)]
            total = least = gaps[0]
            for gap in gaps[1:]:
                total, least = total + gap, np.minimum(least, gap)
            others, earlier = _pairs_of_labels(len(total))
            dominated = ((total > 0) & others | (total == 0) & earlier) & (least > -CAP)
            kept = list(range(len(dominated)))
            for a in reversed(np.flatnonzero(dominated.any(axis=1)).tolist()):
                if dominated[a, kept].any():
                    kept.remove(a)
            found = self._kept[key] = tuple(kept)
        return found

    def _gaps(self, number: int) -> int:
        """Return ``[a, b]``: the least excess of label a over b; at most :data:`CAP`."""

        def gaps() -> Costs:
            table = self.tables[number]
            rows = table.reshape(len(table), -1)
            a, b = rows[:, None], rows[None, :]
            # Entries where both are forbidden do not count.
            apart = np.where((a >= FORBIDDEN) & (b >= FORBIDDEN), CAP, a - b)
            least: Costs = np.minimum(np.maximum(apart.min(axis=-1), -CAP), CAP)
            return least

        return self._once((number, "gaps"), gaps)
