"""Fit links to records of messages and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median

from hap.cluster.link import IMPLEMENTATIONS, LEVELS, Collectives, Link, unused
from hap.cluster.topology import Cluster
from hap.profiler.fit import fit_links
from hap.profiler.samples import MESSAGE, ExchangeRecord, expected, spread

Price = Callable[[Cluster, ExchangeRecord], float]
"""Predicts the seconds of a record's collective on a cluster; all of its ranks take part."""

_ANY = 1e18  # bytes per second: so fast that bytes cost nothing
_SMALL_BYTES, _BETTER = 2**17, 0.7
"""Largest collective that may determine ``least_s``; relative error, compared with a fit without
``least_s``, below which the fit with it is chosen."""

_UNMEASURED = Link(1e10, 1e-5, "assumed: nothing was measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResidual:
    """A collective of one size and skew, and the seconds that the fitted links predict."""

    record: ExchangeRecord
    predicted_s: float

    @property
    def measured_s(self) -> float:
        return expected(self.record.seconds)

    @property
    def error(self) -> float:
        """Predicted over measured time, minus one."""
        return self.predicted_s / self.measured_s - 1


def message_links(
    nodes: Sequence[str], records: Sequence[ExchangeRecord], date: str
) -> tuple[dict[str, Link], Link]:
    """Fit links to messages between two ranks; return (node -> link inside, link between nodes)."""
    inside: dict[str, list[Link]] = {}
    between: list[Link] = []
    pairs: dict[tuple[int, ...], list[ExchangeRecord]] = {}
    for record in records:
        if record.kind == MESSAGE:
            pairs.setdefault(record.groups[0], []).append(record)
    for (a, b), own in pairs.items():
        home = inside.setdefault(nodes[a], []) if nodes[a] == nodes[b] else between
        home.append(_line(own, date))
    anywhere = [link for links in inside.values() for link in links]
    slowest_inside = _slowest(anywhere) or _UNMEASURED
    outer = _slowest(between)
    return (
        {node: _slowest(inside.get(node, [])) or slowest_inside for node in dict.fromkeys(nodes)},
        outer or unused(slowest_inside),
    )


def _line(records: Sequence[ExchangeRecord], date: str) -> Link:
    """Fit latency and bandwidth of one pair of ranks."""
    seconds = [expected(r.seconds) for r in records]
    sizes = [r.nbytes for r in records]
    start = Link(max(n / s for n, s in zip(sizes, seconds, strict=True)), min(seconds))

    def price(links: Sequence[Link], i: int) -> float:
        return links[0].latency_s + sizes[i] / links[0].bandwidth_bytes_per_s

    noise = [spread(r.seconds) for r in records]
    (link,) = fit_links(price, seconds, prior=[start], source="", noise=noise)
    errors = [price([link], i) / s - 1 for i, s in enumerate(seconds)]
    return replace(link, source=told(date, records, errors))


def _slowest(links: Sequence[Link]) -> Link | None:
    """Return a link of the highest latency and lowest bandwidth, for which a ring waits."""
    if not links:
        return None
    slow = min(links, key=lambda link: link.bandwidth_bytes_per_s)
    return replace(slow, latency_s=max(link.latency_s for link in links))


def told(date: str, records: Sequence[ExchangeRecord], errors: Sequence[float]) -> str:
    """Return the provenance: date, number of samples, error of the fit, and spread of repeats."""
    varied = median(spread(r.seconds) for r in records)
    off = median(map(abs, errors))
    return f"measured {date}, n={len(records)}, fit off by {off:.0%}, spread {varied:.0%}"


def collectives(
    cluster: Cluster, records: Sequence[ExchangeRecord], price: Price, date: str
) -> tuple[Collectives, list[LinkResidual]]:
    """Fit links per implementation; return them and the residuals.

    Args:
        cluster: the cluster with links fitted to messages, which are the first guess.
    """
    found: dict[str, dict[str, Mapping[str, Link]]] = {}
    residuals: list[LinkResidual] = []
    for kind, ways in IMPLEMENTATIONS.items():
        for how in ways:
            own = [r for r in records if (r.kind, r.how) == (kind, how)]
            if not own:
                continue
            levels, rests = _fit(cluster, kind, how, own, price, date)
            found.setdefault(kind, {})[how] = levels
            residuals += rests
    return found, residuals


def _fit(
    cluster: Cluster, kind: str, how: str, records: Sequence[ExchangeRecord], price: Price,
    date: str,
) -> tuple[Mapping[str, Link], list[LinkResidual]]:  # fmt: skip
    wide = any(len(cluster.ranks(node)) > 1 for node in cluster.nodes)
    used = {"inside": wide, "between": len(cluster.nodes) > 1}
    names = [level for level in LEVELS if used[level]]
    slowest = _slowest([cluster.intra[node] for node in cluster.nodes])
    assert slowest is not None
    guess = {"inside": slowest, "between": cluster.inter}

    @cache
    def seen(links: tuple[Link, ...]) -> Cluster:
        own = dict(zip(names, links, strict=True))
        return replace(cluster, collectives={kind: {how: own}})

    def predicted(links: Sequence[Link], i: int) -> float:
        # Without the source, which is no figure, equal figures give equal cache keys.
        return price(seen(tuple(replace(link, source="") for link in links)), records[i])

    seconds = [expected(r.seconds) for r in records]
    noise = [spread(r.seconds) for r in records]

    def fitted(prior: Sequence[Link]) -> tuple[list[Link], list[LinkResidual]]:
        found = fit_links(predicted, seconds, prior=prior, source="", noise=noise)
        return found, [
            LinkResidual(record=r, predicted_s=predicted(found, i)) for i, r in enumerate(records)
        ]

    # First guess of latency: it differs from a message's if ranks have little processor time.
    slow_s = max(guess[name].latency_s for name in names) or 1.0
    starts = [Link(_ANY, guess[name].latency_s / slow_s or 1.0) for name in names]
    fewest = min(r.nbytes for r in records)
    start_s = median(
        s / predicted(starts, i)
        for i, (s, r) in enumerate(zip(seconds, records, strict=True)) if r.nbytes == fewest
    )  # fmt: skip
    found = fitted([
        replace(guess[name], latency_s=start_s * start.latency_s)
        for name, start in zip(names, starts, strict=True)
    ])  # fmt: skip
    # Alternative: a minimum time per collective, which larger collectives exceed by their bytes.
    other = fitted([
        replace(guess[name], least_s=_least_s(cluster, name, records)) for name in names
    ])  # fmt: skip
    if _off(other[1]) < _BETTER * _off(found[1]):
        found = other
    made, residuals = found
    source = told(date, records, [r.error for r in residuals])
    return (
        {name: replace(link, source=source) for name, link in zip(names, made, strict=True)},
        residuals,
    )


def _off(residuals: Sequence[LinkResidual]) -> float:
    """Return the mean error of a fit; each error counts as 1 at most."""
    return fmean(min(abs(r.error), 1.0) for r in residuals)


def _least_s(cluster: Cluster, level: str, records: Sequence[ExchangeRecord]) -> float:
    """Return the median seconds of small collectives on a level; 0 if there are none."""
    small = [
        expected(r.seconds) for r in records
        if r.nbytes <= _SMALL_BYTES and _level(cluster, r) == level
    ]  # fmt: skip
    return median(small) if small else 0.0


def _level(cluster: Cluster, record: ExchangeRecord) -> str:
    """Return the level of a collective: ``inside`` machines, or ``between`` them."""
    within = all(len({cluster.devices[r].node for r in group}) == 1 for group in record.groups)
    return "inside" if within else "between"
