"""Fit a device's or a link's figures to measured times, by robust least squares on relative errors.

The roofline ``launch + max(flops / rate + bytes / operands, bytes / bandwidth)`` with a given
launch is linear in the inverse rates if each operator's bound, arithmetic or memory, is known. So
:func:`fit_device` alternates two steps until the bounds are stable: find each operator's bound by
the current figures (:func:`_row`), and solve the linear problem (:func:`_solve`). The unknowns are
relative to the prior, so that one small ridge suits all: a figure without samples keeps its value.

:func:`fit_links` fits links likewise: a collective's cost is piecewise linear in the latencies and
inverse bandwidths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.work import Work

_LAUNCH, _MEMORY, _OPERANDS = "launch_s", "memory_bytes_per_s", "operand_bytes_per_s"
_NOISE = 0.05  # relative error up to which a deviation counts as noise
_LEAST = 0.02  # least figure relative to the prior; a burst through a rate limiter has no latency
_STEP = 1e-6  # relative step of numerical derivatives of a piecewise linear price


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A measured call and its time; ``noise`` is the relative spread of repeats, and ``weight`` the
    sample's weight in the fit.
    """

    works: Sequence[Work]
    seconds: float
    noise: float = 0.0
    weight: float = 1.0


def predict(device: Device, works: Sequence[Work]) -> float:
    """Return the seconds of operators that run one after the other."""
    return sum(device.seconds(work) for work in works)


def relative_error(device: Device, sample: Timing) -> float:
    """Return predicted over measured time, minus one: +0.1 predicts ten percent too much."""
    return predict(device, sample.works) / sample.seconds - 1


def fit_device(
    samples: Sequence[Timing],
    *,
    prior: Device,
    source: str,
    kinds: Sequence[str] = (),
    ridge: float = 0.03,
    rounds: int = 60,
    within: float = _NOISE,
    held: Sequence[str] = (),
) -> Device:
    """Fit the figures of a device to samples.

    Args:
        samples: Measured calls, each of one or more operators.
        prior: First guess. Figures without samples keep its values, and so does the launch cost,
            which is too small a part of most operators to be estimated from them.
        source: Provenance of the fitted figures.
        kinds: Kinds of work whose efficiency is fitted too; the prior must have one for each.
            All samples of a kind have one dtype.
        ridge: Weight of the prior relative to one sample's error; larger trusts it more.
        rounds: Maximum number of alternations.
        within: Relative error up to which errors are squared (Huber loss), and beyond which they
            count by absolute value: larger averages operators that differ, smaller ignores
            outliers.
        held: Figures that keep the prior's values, such as ``memory_bytes_per_s``.

    Returns:
        The prior with fitted rates.

    Raises:
        ValueError: There is no sample, or a time is not positive.
    """
    if not samples or any(not sample.seconds > 0 for sample in samples):
        raise ValueError("a fit needs samples, each with a positive time")
    dtypes = sorted({w.dtype for s in samples for w in s.works if w.flops} & set(prior.flops_per_s))
    names = [*dtypes, _MEMORY, _OPERANDS, _LAUNCH, *kinds]
    free = np.array([name not in (_LAUNCH, *held) for name in names])
    dtype_of = {w.kind: w.dtype for s in samples for w in s.works if w.kind in kinds}

    def device(slowness: np.ndarray) -> Device:
        return _scaled(prior, dict(zip(names, map(float, slowness), strict=True)), dtype_of)

    def rows(slowness: np.ndarray) -> np.ndarray:
        present = device(slowness)
        return np.array([_row(sample, present, prior, names) for sample in samples])

    trust = _trust([s.noise for s in samples]) * np.array([s.weight for s in samples])
    slowness, last = _alternate(rows, trust, free, ridge, rounds, within=within)
    # A figure that binds in no sample keeps the prior's value and source.
    fitted = [name for name, ok in zip(names, free & last.any(axis=0), strict=True) if ok]
    figures = [f"flops_per_s.{name}" if name in dtypes else name for name in fitted]
    figures = ["efficiency" if name in kinds else name for name in figures]
    return replace(device(slowness), source={**prior.source, **dict.fromkeys(figures, source)})


def fit_links(
    price: Callable[[Sequence[Link], int], float],
    seconds: Sequence[float],
    *,
    prior: Sequence[Link],
    source: str,
    noise: Sequence[float] | None = None,
    ridge: float = 0.003,
    rounds: int = 40,
) -> list[Link]:
    """Fit latencies and bandwidths of links to measured times of collectives.

    Args:
        price: Returns the seconds of a sample, by its index, on given links: a maximum, minimum or
            sum of latencies and inverse bandwidths times constants.
        seconds: The time of each sample.
        prior: First guess of the links; figures without samples keep its values, and so does
            ``least_s``.
        source: Provenance of the fitted links.
        noise: Relative spread of the repeats of each sample.

    Raises:
        ValueError: There is no sample, or a time is not positive.
    """
    if not seconds or any(not s > 0 for s in seconds):
        raise ValueError("a fit needs samples, each with a positive time")

    def links(slowness: np.ndarray) -> list[Link]:
        return [
            Link(link.bandwidth_bytes_per_s / x[1], link.latency_s * x[0], source, link.least_s)
            for link, x in zip(prior, slowness.reshape(-1, 2).tolist(), strict=True)
        ]

    def prices(slowness: np.ndarray) -> np.ndarray:
        these = links(slowness)
        return np.array([price(these, i) for i in range(len(seconds))])

    def rows(slowness: np.ndarray) -> np.ndarray:
        # The price is homogeneous of degree 1: the sum of its derivatives times the figures.
        here, columns = prices(slowness), []
        for k in range(len(slowness)):
            more = slowness.copy()
            more[k] *= 1 + _STEP
            columns.append((prices(more) - here) / (_STEP * slowness[k]) / np.array(seconds))
        return np.stack(columns, axis=1)

    trust = _trust(noise or [0.0] * len(seconds))
    free = np.ones(2 * len(prior), dtype=bool)
    slowness, _ = _alternate(rows, trust, free, ridge, rounds, low=_LEAST)
    return links(slowness)


def _trust(noise: Sequence[float]) -> np.ndarray:
    """Return the weights of samples: noisy ones weigh less."""
    trust: np.ndarray = _NOISE / np.maximum(_NOISE, np.array(noise))
    return trust


def _alternate(
    rows: Callable[[np.ndarray], np.ndarray],
    trust: np.ndarray,
    free: np.ndarray,
    ridge: float,
    rounds: int,
    low: float = 0.05,
    within: float = _NOISE,
) -> tuple[np.ndarray, np.ndarray]:
    """Linearize and solve until the slowness converges; return (slowness, its rows)."""
    slowness = np.ones(len(free))
    for _ in range(rounds):
        # Damped: an operator near the roofline's ridge would otherwise alternate for ever.
        step = 0.5 * (slowness + _solve(rows(slowness), trust, slowness, free, ridge, low, within))
        converged = np.allclose(step, slowness, rtol=1e-6)
        slowness = step
        if converged:
            break
    return slowness, rows(slowness)


def _row(sample: Timing, device: Device, prior: Device, names: list[str]) -> list[float]:
    """Return the sample's time under the prior, by binding figure, divided by its seconds.

    Its product with the slowness (prior figure / fitted figure) is predicted / measured.
    """
    share = dict.fromkeys(names, 0.0)
    for work in sample.works:
        if not work.flops and not work.bytes:
            continue
        share[_LAUNCH] += prior.launch_of(work)
        memory_s = work.bytes / device.memory_bytes_per_s
        compute_s = work.flops / device.rate(work.kind, work.dtype)
        if compute_s + work.bytes * device.operand_s(work.kind) > memory_s:
            # A dtype without a rate of its own uses that of float32.
            dtype = work.dtype if work.dtype in share else "float32"
            figure = work.kind if work.kind in share else dtype
            share[figure] += work.flops / prior.rate(work.kind, work.dtype)
            share[_OPERANDS] += work.bytes * prior.operand_s(work.kind)
        else:
            share[_MEMORY] += work.bytes / prior.memory_bytes_per_s
    return [share[name] / sample.seconds for name in names]


def _solve(
    rows: np.ndarray,
    trust: np.ndarray,
    slowness: np.ndarray,
    free: np.ndarray,
    ridge: float,
    low: float,
    within: float,
) -> np.ndarray:
    """One reweighted step of min over x of sum trust huber(rows @ x - 1) + ridge |x - 1|^2.

    The Huber loss is quadratic up to ``within`` and linear beyond, because measurements contain
    outliers that no model explains. The slowness stays between ``low`` and its inverse, so that
    no rate becomes negative.
    """
    weight = trust / np.maximum(np.abs(rows @ slowness - 1), within)
    a = np.vstack([rows[:, free] * np.sqrt(weight)[:, None], np.sqrt(ridge) * np.eye(free.sum())])
    fixed = rows[:, ~free] @ slowness[~free]
    b = np.concatenate([(1 - fixed) * np.sqrt(weight), np.full(free.sum(), np.sqrt(ridge))])
    solved = slowness.copy()
    solved[free] = np.clip(np.linalg.lstsq(a, b, rcond=None)[0], low, 1 / low)
    return solved


def _scaled(prior: Device, slowness: dict[str, float], dtype_of: dict[str, str]) -> Device:
    rates = {dtype: rate / slowness.get(dtype, 1.0) for dtype, rate in prior.flops_per_s.items()}
    # The fit is of a kind's rate; its efficiency is that rate relative to the rate of products.
    efficiency = {
        kind: part * slowness.get(dtype, 1.0) / slowness[kind]
        for kind, dtype in dtype_of.items()
        for part in (prior.efficiency[kind],)
    }
    return replace(
        prior,
        flops_per_s=rates,
        memory_bytes_per_s=prior.memory_bytes_per_s / slowness[_MEMORY],
        operand_bytes_per_s=prior.operand_bytes_per_s / slowness[_OPERANDS],
        efficiency={**prior.efficiency, **efficiency},
    )
