"""Mutators of plan files: each changes one thing in the data of a plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from hap.cluster.link import IMPLEMENTATIONS
from hap.cluster.topology import digest_of
from hap.ir.graph import Graph
from hap.ir.placement import LOCAL, Placement, conversion, convertible

Data = dict[str, Any]
Mutator = Callable[[Data, random.Random], bool]
"""Changes the data in place; returns ``False`` if nothing in the data can be changed."""

PLACEMENTS = ("R", "P", "L", "S0", "S1", "S2")
_OTHER_TYPES: tuple[Any, ...] = (
    None, True, False, 1.5, -1, 0, 10**12, "", "x", "1", [], [0], {}, {"a": 1}, "NaN",
)  # fmt: skip


def mutate(data: Data, kind: str, rng: random.Random) -> Data:
    """Return a copy of a plan's data with one mutation, its digests computed again."""
    for _ in range(100):
        made = copy.deepcopy(data)
        if MUTATORS[kind](made, rng) and made != data:
            return _digested(made)
    raise ValueError(f"mutator {kind!r} finds nothing to change in this plan")


def applies(data: Data, kind: str) -> bool:
    """Return whether the mutator can change this plan."""
    try:
        mutate(data, kind, random.Random(0))
    except ValueError:
        return False
    return True


def _digested(data: Data) -> Data:
    """Return the data with fitting digests, so that no digest detects the mutation.

    A graph that cannot be read keeps the old digest.
    """
    try:
        data["graph_digest"] = Graph.from_json(data["graph"]).digest
        data["cluster_digest"] = digest_of(data["cluster"])
    except (KeyError, ValueError, TypeError, IndexError, AttributeError):
        pass
    return data


def _program(data: Data, rng: random.Random) -> Any:
    """Return one of the plan's programs: between the machines, inside, or a stage's."""
    programs = [data["program"]]
    if "inside" in data:
        programs.append(data["inside"]["program"])
    if "stages" in data and rng.random() < 0.8:
        programs = [stage["program"] for stage in data["stages"]["stages"]]
    return rng.choice(programs)


def _shares(data: Data, rng: random.Random) -> Any:
    stages = [stage["shares"] for stage in data.get("stages", {}).get("stages", ())]
    found = [s for s in (data["shares"], data.get("inside", {}).get("shares"), *stages) if s]
    return rng.choice(found) if found else None


def _steps(program: Any, kind: str) -> list[Any]:
    return [step for step in program["instructions"] if step[0] == kind]


def _placement(data: Data, rng: random.Random) -> bool:
    """Change any placement in a program."""
    program = _program(data, rng)
    places: list[tuple[Any, Any]] = [(program["inputs"], key) for key in program["inputs"]]
    places += [(program["outputs"], k) for k in range(len(program["outputs"]))]
    for step in program["instructions"]:
        if step[0] == "convert":
            places += [(step, 2), (step, 3)] * 3
        else:
            places += [(side, k) for side in (step[2], step[3]) for k in range(len(side))]
    owner, key = rng.choice(places)
    owner[key] = rng.choice(PLACEMENTS)
    return True


def _rows(data: Data, rng: random.Random) -> bool:
    """Swap the rows of two computations."""
    steps = _steps(_program(data, rng), "compute")
    one = rng.choice(steps)
    fits = [s for s in steps if [len(x) for x in s[2:4]] == [len(x) for x in one[2:4]]]
    other = rng.choice(fits)
    one[2], one[3], other[2], other[3] = other[2], other[3], one[2], one[3]
    return True


def _partial_for_whole(data: Data, rng: random.Random) -> bool:
    """Drop a conversion and use its source as its result, as a wrong rule would."""
    program = _program(data, rng)
    steps = program["instructions"]
    converts = _steps(program, "convert")
    if not converts:
        return False
    step = rng.choice(converts)
    producer = [
        s for s in steps if s[0] == "compute" and step[2] in s[3] and s[1] in step[1]
    ]  # fmt: skip
    for maker in producer[:1]:
        maker[3] = [step[3] if p == step[2] else p for p in maker[3]]
    steps.remove(step)
    return bool(producer)


def _conversion(data: Data, rng: random.Random) -> bool:
    """Change a conversion's implementation, or its bucket."""
    converts = _steps(_program(data, rng), "convert")
    if not converts:
        return False
    step = rng.choice(converts)
    what = rng.randrange(4)
    src, dst = Placement.parse(step[2]), Placement.parse(step[3])
    kind = conversion(src, dst) if convertible(src, dst) else None
    if what == 0 and kind and kind not in LOCAL:
        step[4] = rng.choice(IMPLEMENTATIONS[kind])
    elif what == 1:
        step[4] = rng.choice([how for ways in IMPLEMENTATIONS.values() for how in ways] + [""])
    elif what == 2:
        step[6] = rng.choice([0, 1, 2, 7, -1])
    else:
        step[2], step[3] = step[3], step[2]
    return True


def _mask_dropped(data: Data, rng: random.Random) -> bool:
    """Turn a mask into a replica: all ranks add what one rank should."""
    program = _program(data, rng)
    masks = [s for s in _steps(program, "convert") if (s[2], s[3]) == ("R", "P")]
    if not masks:
        return False
    mask = rng.choice(masks)
    program["instructions"].remove(mask)
    for step in _steps(program, "compute"):
        if "P" in step[2]:
            step[2] = ["R" if p == "P" and rng.random() < 0.5 else p for p in step[2]]
    return True


def _share(data: Data, rng: random.Random) -> bool:
    """Change one rank's share, with or without the sum, or drop a rank's entry."""
    shares = _shares(data, rng)
    if not shares:
        return False
    name = rng.choice(list(shares))
    units = shares[name]
    if len(units) < 2:
        return False
    one, other = rng.sample(range(len(units)), 2)
    match rng.randrange(9):
        case 0 | 1 | 2:
            units[one], units[other] = units[one] + units[other], 0
        case 3:
            units[one], units[other] = units[other], units[one]
        case 4:
            step = rng.choice((1, 2))
            units[one], units[other] = units[one] + step, units[other] - step
        case 5:
            units[one] += rng.choice((1, -1, 5))
        case 6:
            units[one], units[other] = units[one] + 0.5, units[other] - 0.5
        case 7:
            units.pop()
        case _:
            if rng.random() < 0.5:
                del shares[name]
            else:
                units[one] = rng.choice([str(units[one]), float(units[one]), None, [units[one]]])
    return True


def _axis(data: Data, rng: random.Random) -> bool:
    """Change a dim's axis or number of units."""
    axes = _program(data, rng)["axes"]
    if not axes:
        return False
    key = rng.choice(list(axes))
    names = [name for name, _ in axes.values()]
    match rng.randrange(5):
        case 0:
            axes[key][0] = rng.choice([*names, "nothing"])
        case 1:
            axes[key][1] = rng.choice([0, 1, 2, 3, axes[key][1] * 2, axes[key][1] // 2, -1])
        case 2:
            old, new = axes[key][1], rng.choice([2, 3, axes[key][1] * 2, axes[key][1] + 1])
            for entry in axes.values():
                entry[1] = new if entry[1] == old else entry[1]
        case 3:
            del axes[key]
        case _:
            axes[rng.choice(list(axes))] = list(axes[key])
    return True


def _drop(data: Data, rng: random.Random) -> bool:
    """Drop an instruction."""
    steps = _program(data, rng)["instructions"]
    converts = [k for k, s in enumerate(steps) if s[0] == "convert"]
    del steps[rng.choice(converts if converts and rng.random() < 0.5 else range(len(steps)))]
    return True


def _duplicate(data: Data, rng: random.Random) -> bool:
    """Duplicate an instruction."""
    steps = _program(data, rng)["instructions"]
    at = rng.randrange(len(steps))
    steps.insert(rng.randrange(at, min(at + 4, len(steps)) + 1), copy.deepcopy(steps[at]))
    return True


def _reorder(data: Data, rng: random.Random) -> bool:
    """Swap two instructions, or move one."""
    steps = _program(data, rng)["instructions"]
    at = rng.randrange(len(steps) - 1)
    if rng.random() < 0.5:
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    else:
        steps.insert(rng.randrange(len(steps)), steps.pop(at))
    return True


def _side(data: Data, rng: random.Random) -> bool:
    """Move an instruction from the forward to the backward, or back."""
    step = rng.choice(_program(data, rng)["instructions"])
    at = 5 if step[0] == "convert" else 4
    step[at] = not step[at]
    return True


def _leaves(data: Any, kinds: type | tuple[type, ...]) -> list[tuple[Any, Any]]:
    """Return (container, key) of all plain values of some types."""
    found: list[tuple[Any, Any]] = []
    stack = [data]
    while stack:
        held = stack.pop()
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        for key, value in pairs:
            if isinstance(value, dict | list):
                stack.append(value)
            elif isinstance(value, kinds) and not (isinstance(value, bool) and kinds is not bool):
                found.append((held, key))
    return found


def _part(data: Data, rng: random.Random) -> Any:
    """Return a part of the data, small parts as often as the graph."""
    key = rng.choice([k for k, v in data.items() if isinstance(v, dict | list)])
    part = data[key]
    if isinstance(part, dict) and rng.random() < 0.5:
        inner = [v for v in part.values() if isinstance(v, dict | list) and v]
        part = rng.choice(inner) if inner else part
    return part


def _number(data: Data, rng: random.Random) -> bool:
    """Change a number."""
    leaves = _leaves(_part(data, rng), (int, float))
    if not leaves:
        return False
    held, key = rng.choice(leaves)
    old = held[key]
    held[key] = rng.choice([old + 1, old - 1, -old, old * 2, old * 0.5, 0, 1, 1e300])
    return True


def _type(data: Data, rng: random.Random) -> bool:
    """Replace a value by one of another type."""
    part = data if rng.random() < 0.2 else _part(data, rng)
    held = part
    while True:
        if not held:
            return False
        key = rng.choice(list(held)) if isinstance(held, dict) else rng.randrange(len(held))
        if isinstance(held[key], dict | list) and held[key] and rng.random() < 0.8:
            held = held[key]
        else:
            break
    held[key] = copy.deepcopy(rng.choice(_OTHER_TYPES))
    return True


def _name(data: Data, rng: random.Random) -> bool:
    """Replace a text by another text of the same part, or by a longer one."""
    leaves = _leaves(_part(data, rng), str)
    if not leaves:
        return False
    held, key = rng.choice(leaves)
    other, place = rng.choice(leaves)
    held[key] = rng.choice([other[place], held[key] + "x", held[key][:-1]])
    return True


def _key(data: Data, rng: random.Random) -> bool:
    """Drop, rename or add a field."""
    held: Any = data
    while rng.random() < 0.7:
        inner = [v for v in (held.values() if isinstance(held, dict) else held)
                 if isinstance(v, dict | list) and v]  # fmt: skip
        if not inner:
            break
        held = rng.choice(inner)
    if isinstance(held, list):
        at = rng.randrange(len(held))
        if rng.random() < 0.5:
            del held[at]
        else:
            held.insert(at, copy.deepcopy(held[at]))
        return True
    key = rng.choice(list(held))
    match rng.randrange(3):
        case 0:
            del held[key]
        case 1:
            held[key + "_"] = held.pop(key)
        case _:
            held["surplus"] = 1
    return True


def _swapped_entries(data: Data, rng: random.Random) -> bool:
    """Swap the values of two entries of one mapping of a program."""
    program = _program(data, rng)
    held = program[rng.choice(("inputs", "axes"))]
    if len(held) < 2:
        return False
    one, other = rng.sample(list(held), 2)
    held[one], held[other] = held[other], held[one]
    return True


def _stage(data: Data, rng: random.Random) -> bool:
    """Change a cut, the ranks of stages, the microbatches in flight, or the order of stages."""
    if "stages" not in data:
        return False
    cuts, stages = data["stages"]["cuts"], data["stages"]["stages"]
    one, other = rng.sample(stages, 2)
    match rng.randrange(9):
        case 0:
            cuts[rng.randrange(len(cuts))] = rng.choice(data["graph"]["nodes"])[0]
        case 1:
            one["ranks"], other["ranks"] = other["ranks"], one["ranks"]
        case 2:
            one["ranks"].append(one["ranks"].pop(0))
        case 3:
            one["ranks"] = rng.choice(([], [0], [*one["ranks"], *other["ranks"]], [-1], [10**9]))
        case 4:
            one[rng.choice(("in_flight", "delay"))] = rng.choice((0, 1, 2, 100, -1, 10**12))
        case 5:
            for key in ("program", "shares"):
                one[key], other[key] = other[key], one[key]
        case 6:
            stages.remove(one)
        case 7:
            stages.insert(0, copy.deepcopy(one))
        case _:
            del cuts[rng.randrange(len(cuts))]
    return True


MUTATORS: dict[str, Mutator] = {
    "placement": _placement,
    "rows swapped": _rows,
    "result passed off": _partial_for_whole,
    "mask dropped": _mask_dropped,
    "conversion": _conversion,
    "shares": _share,
    "axis": _axis,
    "entries swapped": _swapped_entries,
    "dropped": _drop,
    "duplicated": _duplicate,
    "reordered": _reorder,
    "other pass": _side,
    "number": _number,
    "type": _type,
    "name": _name,
    "field": _key,
    "stage": _stage,
}
