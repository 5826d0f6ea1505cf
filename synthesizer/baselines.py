"""What people run today, as programs of the same kind, judged by the same simulator.

A baseline is the same search in a smaller space: its placements are what the method allows,
its shares what the method gives. It does not trade time for memory: it fits or it doesn't.
"""

from __future__ import annotations

import numpy as np

from hap.axes import Shares
from hap.cluster import Cluster
from hap.errors import HapError
from hap.placement import Placement, R, S
from hap.synthesizer.engines import eliminate
from hap.synthesizer.labelling import Allowed
from hap.synthesizer.outcome import Engine
from hap.synthesizer.space import Space
from hap.synthesizer.synthesize import Candidate, Synthesizer, spread


def batch_axis(space: Space) -> str | None:
    """The axis on which every input of the batch can be split along dim 0, if there is one."""
    names = {space.axes.of.get((i.tensor, 0)) for i in space.graph.role("input")}
    return names.pop() if len(names) == 1 else None


def data_parallel(space: Space, axis: str, *, sharded_storage: bool) -> Allowed:
    """Whatever has a batch dim is split along it; parameters are stored whole, or as by ZeRO."""
    dim_of = {tensor: dim for (tensor, dim), name in space.axes.of.items() if name == axis}
    fixed = {t for t, holdings in space.holdings.items() if holdings == ((R,),)}
    parameters = {i.tensor for i in space.graph.role("parameter")}

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        if tensor in fixed:
            return True
        if tensor in parameters:
            if not stored:
                return p == R
            splits = sharded_storage and S(0) in space.sources[tensor]
            return p == (S(0) if splits else R)
        return p == S(dim_of[tensor]) if tensor in dim_of else True

    return allowed


def baselines(
    space: Space, cluster: Cluster, optimizer_states: int, engine: Engine = eliminate
) -> dict[str, Candidate | str]:
    """Name -> candidate, or the reason why the method can't run this model."""
    axis = batch_axis(space)
    methods = {
        "data parallel, even": (False, False),
        "data parallel, proportional": (False, True),
        "ZeRO, proportional": (True, True),
    }
    found: dict[str, Candidate | str] = {}
    for name, (sharded_storage, by_speed) in methods.items():
        if axis is None:
            found[name] = "the inputs have no common batch dim"
            continue
        allowed = data_parallel(space, axis, sharded_storage=sharded_storage)
        synthesizer = Synthesizer(space, cluster, optimizer_states, allowed, engine)
        weights = synthesizer.machine.speed if by_speed else np.ones(cluster.world_size)
        shares: Shares = spread(space.axes, weights)
        try:
            found[name] = synthesizer.cheapest(shares)
        except HapError as error:
            found[name] = error.what
    return found


def fewer_devices(
    space: Space, cluster: Cluster, optimizer_states: int, engine: Engine = eliminate
) -> dict[str, tuple[str, Candidate]]:
    """Name -> (which devices, best pair), for a part of the cluster that may do better alone."""
    speeds = [d.rate("matmul", "float32") for d in cluster.devices]
    slowest, fastest = int(np.argmin(speeds)), int(np.argmax(speeds))
    found = {}
    if cluster.world_size > 2:
        synthesizer = Synthesizer(space, cluster.without(slowest), optimizer_states, engine=engine)
        pair = synthesizer.search(next(synthesizer.starts()))
        balanced = synthesizer.judge(pair.program, synthesizer.balance(pair))
        best = min(pair, balanced, key=lambda c: c.rank)
        found["without the slowest device"] = (f"without {cluster.devices[slowest].name}", best)
    if cluster.world_size > 1:
        synthesizer = Synthesizer(space, cluster.only(fastest), optimizer_states, engine=engine)
        pair = synthesizer.cheapest(next(synthesizer.starts()))
        found["the fastest device alone"] = (f"only {cluster.devices[fastest].name}", pair)
    return found
