"""``python -m tests.fuzz``: search for modules with wrong plans, or check one again."""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.check import Outcome, check
from tests.fuzz.grammar import recipes
from tests.fuzz.recipe import Recipe, load

ROUND = 20
"""Cases per round. The clock is read between rounds, and a failure ends its round. Rounds are
short because Hypothesis varies earlier draws: long rounds contain many similar cases."""

SHRINKING_S = 90.0
"""Seconds after the first failure at which shrinking stops."""


class Search:
    """Runs rounds of random cases until the time is up, and writes failures into a folder."""

    def __init__(self, folder: Path, longest: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self._folder, self._longest = folder, longest
        self._seen: set[str] = set()
        self._failed_at: float | None = None
        self._smallest: tuple[Recipe, Exception] | None = None

    def round(self, number: int) -> None:
        """Check the cases of one round; shrink and store the first failure."""
        self._failed_at = self._smallest = None

        @seed(number)
        @settings(
            max_examples=ROUND, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
        )  # fmt: skip
        @given(recipes(longest=self._longest))
        def cases(recipe: Recipe) -> None:
            self._check(recipe)

        try:
            cases()
        except Exception:
            if self._smallest is None:
                raise
            self._keep(*self._smallest, number)

    def _check(self, recipe: Recipe) -> None:
        if self._failed_at and time.monotonic() - self._failed_at > SHRINKING_S:
            return
        if self._failed_at is None and repr(recipe) in self._seen:
            return  # already checked
        try:
            outcome = check(recipe)
        except Exception as error:
            self._failed_at = self._failed_at or time.monotonic()
            self._smallest = recipe, error
            raise
        if self._failed_at is None:
            self.counts[outcome] += 1
            self._seen.add(repr(recipe))

    def _keep(self, recipe: Recipe, error: Exception, number: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        what = "".join(traceback.format_exception(error, limit=-4))
        path = self._folder / f"failure_{number}.json"
        path.write_text(json.dumps(recipe.to_json(), indent=1) + "\n")
        path.with_suffix(".py").write_text(f'r"""{what}"""\n\n{recipe.script()}')
        self.failures.append(str(path))
        print(f"\n{what}\n{recipe.source}\nwritten to {path}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--folder", type=Path, default=Path("fuzz-failures"), help="for failures")
    parser.add_argument("--longest", type=int, default=8, help="operators of a module")
    parser.add_argument("--replay", help="check this recipe alone")
    given = parser.parse_args()
    if given.replay:
        recipe = load(given.replay)
        print(recipe.source, check(recipe), sep="\n")
        return 0
    search, number = Search(given.folder, given.longest), given.seed
    start, spent = time.monotonic(), time.process_time()
    while time.monotonic() - start < 60 * given.minutes:
        search.round(number)
        number += 1
        told = ", ".join(f"{search.counts[o]} {o}" for o in Outcome if search.counts[o])
        each = (time.process_time() - spent) / max(search.counts.total(), 1)
        print(
            f"{(time.monotonic() - start) / 60:.1f} min, rounds to {number - 1}: {told},"
            f" {len(search.failures)} failures, {each:.2f} s of processor each", flush=True,
        )  # fmt: skip
    return bool(search.failures)


if __name__ == "__main__":
    sys.exit(main())
