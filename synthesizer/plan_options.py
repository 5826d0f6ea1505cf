"""Options of planning."""

from __future__ import annotations

from dataclasses import dataclass

from hap.cluster.topology import Cluster
from hap.errors import InputError
from hap.synthesizer.pins import read_pin
from hap.synthesizer.search.engines import engine_named


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of :func:`hap.plan`; the defaults are for most users.

    Attributes:
        all_devices: use every device, even if some are predicted to be faster without the others.
        allow_idle: accept a batch with fewer rows than devices.
        mesh: plan over two axes, between machines and inside them (True), over one (False), or
            both where the cluster allows it, to take the better one (None).
        recompute: activations that the backward recomputes, a mode of
            :data:`hap.capture.recompute.WAYS` or ``""`` for none; None: none, unless memory is short,
            and recomputing is faster or nothing fits without it.
        accumulate: take the batch in microbatches, whose gradients add up, where memory is short and that is
            faster, or nothing fits without.
        compare: also plan the baselines that are not planned by default.
        engine: the search engine, a name in :data:`hap.synthesizer.search.engines.ENGINES`.
        prove: searches to spend on a better lower bound of the step; the plan stays the same.
        strict_rules: refuse operators whose rows are neither in the rule table nor in a user's rule,
            nor follow from tags and schema; by default these are discovered, or replicated.
        pins: placements that the program must have, such as ``layers.3.weight=S0``; see
            :mod:`hap.synthesizer.pins`. The plan then has one mesh axis.
        keep: names of devices that must not be left out.
        allow: roundings of gradients to try, of :data:`hap.ir.half_gradients.ROUNDINGS`; one is
            taken if it is predicted to be faster. Training is then not equal to one device's.
        stages: also search pipelines of stages, in microbatches, and take one that is predicted to be
            faster; see :mod:`hap.synthesizer.stages`.

    Raises:
        InputError: the engine is unknown, or a text is no pin.
    """

    all_devices: bool = False
    allow_idle: bool = False
    mesh: bool | None = None
    recompute: str | None = None
    accumulate: bool = True
    compare: bool = False
    engine: str = "exact"
    prove: int = 0
    strict_rules: bool = False
    pins: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    stages: bool = False

    def __post_init__(self) -> None:
        engine_named(self.engine)
        for text in self.pins:
            read_pin(text)

    def kept_ranks(self, cluster: Cluster) -> frozenset[int]:
        """Return the ranks of the devices to keep.

        Raises:
            InputError: the cluster has no device of a name.
        """
        known = {device.name: rank for rank, device in enumerate(cluster.devices)}
        if missing := [name for name in self.keep if name not in known]:
            raise InputError(
                f"the cluster has no device {missing[0]!r}", hint=f"it has {', '.join(known)}"
            )
        return frozenset(known[name] for name in self.keep)
