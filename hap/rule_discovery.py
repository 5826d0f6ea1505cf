"""Discover rules of operators that the table lacks, by running them on split inputs.

A call runs on small random tensors, whole and in parts: every tensor replicated, cut along
each of its dims, or a sum of terms. Its rows are the placements in which the parts form the
whole, for all samples of the call, including other sizes and values of other magnitudes.
Behaviour that no sample shows, such as a branch on values never drawn, stays unknown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hap.capture import operator_schemas
from hap.errors import UnsupportedOpError
from hap.ir.graph import Dtype, Graph, Ref
from hap.ir.graph import Tensor as Described
from hap.rule_check import Case, Sample, WorkSpentError, cuts, gives, true_rows
from hap.runtime.emit import resolve
from hap.synthesizer.rules import Call, Row
from hap.synthesizer.rules.textual_rules import kind, written_rows

LARGEST = 1 << 20
"""Limit of elements of the largest tensor of a sample."""

FEW = 4
"""Size up to which a dim may have a meaning, such as the coordinates of a point: it is also kept."""

WORK = 10_000.0
"""Limit of the search for rows, in runs of small tensors; counted, so that it is repeatable."""

PRECISION = ((torch.float64, 1e-10), (torch.float32, 1e-4))
"""(dtype, tolerance) of the comparison; the first that the operator takes is used."""

_PRIMES = ((5, 3, 7, 11, 13, 17, 19, 23), (7, 11, 5, 3, 19, 13, 23, 17))
_VALUES = 2
"""Number of random values per choice of sizes."""

_SCALES = (1e-3, 1e3)
"""Magnitudes of further values, below and above the thresholds of most operators."""

_THRESHOLDS = 4
"""Limit of the arguments whose magnitudes are tried as thresholds."""


class NoSampleError(UnsupportedOpError):
    """The operator failed on small tensors with the structure of its call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The rows of one kind of call, with the evidence.

    ``kind``: see :func:`hap.synthesizer.rules.textual_rules.kind`. ``shapes``: of the tensors of each
    sample. ``trials``: number of trials of each row, over samples and cuts.
    """

    kind: str
    where: str
    rows: tuple[Row, ...]
    shapes: tuple[str, ...]
    trials: int
    tolerance: float

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the rows in the format of a rule."""
        return (f"# {self.evidence}", *(_text(row) for row in self.rows))

    @property
    def evidence(self) -> str:
        return (
            f"each row holds in {self.trials} trials to {self.tolerance:.0e}: "
            f"sizes {'; '.join(self.shapes)}; 2 and 3 ranks, uneven and empty parts"
        )


def full_name(op: str) -> str:
    """``mine.scale`` -> ``mine.scale.default``."""
    name = op.replace("::", ".")
    return name if name.count(".") > 1 else f"{name}.default"


def discovered(call: Call) -> Discovery:
    """Return the rows of a call.

    Raises:
        UnsupportedOpError: no row can describe the operator: it draws random numbers, writes into
            its inputs, or makes shapes of data.
        NoSampleError: the operator runs on no sample, or a result is one number in all of them.
    """
    samples, tolerance = samples_of(call)
    cases = [Case(sample, tolerance) for sample in samples]
    if not all(_varies(out, cases) for out in cases[0].whole):
        raise NoSampleError(
            f"operator {call.node.op} makes one number alone of random inputs, which shows no rule",
            where=call.node.source,
            hint="write its rule in the model file: see docs/rules.md",
        )
    rows = _true_rows(cases[0])
    rows = [
        row for row in rows
        if row.units == 0 or row in written_rows(_call(cases[0]), [_text(row)])  # whole blocks
    ]  # fmt: skip
    for case in cases[1:]:
        rows = [row for row in rows if _holds(case, row)]
    rows = [row for k, row in enumerate(rows) if not _implied(row, rows, k)]
    return Discovery(
        kind=kind(call), where=call.node.source, rows=tuple(rows),
        shapes=tuple(dict.fromkeys(_shapes(case) for case in cases)),
        trials=len(cases) * len(cuts(6)), tolerance=tolerance,
    )  # fmt: skip


def _varies(out: str, cases: Sequence[Case]) -> bool:
    """Return whether a result has several numbers, so that a wrong placement of it shows."""
    made = torch.cat([case.whole[out].flatten() for case in cases])
    return made.numel() == 0 or len(made.unique()) > 1


def _true_rows(case: Case) -> list[Row]:
    """Return the rows of a case; :data:`WORK` limits the tried placements of its inputs."""
    found: list[Row] = []
    for every in (True, False):  # fewer placements if the first search is cut short
        case.work_left = WORK
        try:
            for row in true_rows(case, every=every):
                if row not in found and not case.wrong(row):
                    found.append(row)
            break
        except WorkSpentError:
            continue
    case.work_left = math.inf
    return found


def _call(case: Case) -> Call:
    return Call(node=case.node, tensors=case.graph.tensors)


def _text(row: Row) -> str:
    ins, outs = (", ".join(str(p) if p else "-" for p in side) for side in (row.ins, row.outs))
    return f"{ins} -> {outs}"


def _shapes(case: Case) -> str:
    return ", ".join("x".join(map(str, t.shape)) or "scalar" for t in case.given.values())


def _holds(case: Case, row: Row) -> bool:
    if not row.units:
        return not case.wrong(row)
    try:
        (_, *same) = written_rows(_call(case), [_text(row)])
    except ValueError:  # other sizes give another number of results
        return False
    return all(not case.wrong(r) for r in same)


def _implied(row: Row, rows: Sequence[Row], at: int) -> bool:
    """Return whether another row, with free slices and masks, does the same; of two, the first."""
    return any(
        gives(other, row) and (not gives(row, other) or k < at)
        for k, other in enumerate(rows) if k != at
    )  # fmt: skip


# --- samples ---


def samples_of(call: Call) -> tuple[list[Sample], float]:
    """Return small calls of one kind with random values, and the tolerance of their results."""
    op = call.node.op
    resolved(op, call.node.source)
    error: Exception | None = None
    for dtype, tolerance in PRECISION:
        samples: list[Sample] = []
        scaled: list[Sample] = []
        for sizes in _sizes(call):
            try:
                made = [_sample(call, sizes, dtype, seed) for seed in range(_VALUES)]
                shown = [_steady(sample, call.node.source) for sample in made]
            except UnsupportedOpError:
                raise
            except Exception as raised:  # any error by which a kernel refuses sizes
                error = raised
                continue
            if shown[0] != shown[1]:
                raise _unfit(op, call.node.source, "the shapes of its results depend on the data")
            if all(_kind(sample) == _widened(kind(call), dtype) for sample in made):
                scaled = scaled or _scaled(call, sizes, dtype, made[0])
                samples += made
            if len(samples) >= 2 * _VALUES:
                break
        if samples:
            return [*samples, *scaled], tolerance
    raise NoSampleError(
        f"operator {op} fails on every sample of its call: {error}",
        where=call.node.source,
        hint="it must run on the CPU, on tensors of any size; or write its rule in the model "
        "file: see docs/rules.md",
    )


def _scaled(
    call: Call, sizes: Mapping[int, int], dtype: torch.dtype, plain: Sample
) -> list[Sample]:
    """Return samples of other magnitudes, without those at which the operator fails or overflows.

    ``plain``: the sample of the same sizes and random numbers at scale 1.
    """
    where, found = call.node.source, []
    shown = _steady(plain, where)
    for scale in _scales(call):
        sample = _sample(call, sizes, dtype, 0, scale)
        try:
            steady = _steady(sample, where)
        except UnsupportedOpError:
            raise
        except Exception:
            continue  # any error by which a kernel refuses values
        if steady != shown:
            raise _unfit(call.node.op, where, "the shapes of its results depend on the data")
        if _overflows(sample) <= _overflows(plain):
            found.append(sample)
    return found


def _scales(call: Call) -> list[float]:
    """Return magnitudes other than 1: fixed ones, and some around the numbers among the arguments."""
    numbers = list(_numbers(_values(call)))
    numbers.sort(key=lambda number: isinstance(number, int))  # sizes and dims are no thresholds
    sizes = list(dict.fromkeys(abs(float(n)) for n in numbers if n))[:_THRESHOLDS]
    near = [factor * size for size in sizes for factor in (0.1, 10.0)]
    return [s for s in dict.fromkeys((*_SCALES, *near)) if 0 < s < math.inf and s != 1]


def _overflows(sample: Sample) -> int:
    """Return the number of infinite and undefined elements of a sample's results."""
    return sum(int((~t.isfinite()).sum()) for t in sample.run() if t is not None)


def _kind(sample: Sample) -> str:
    graph = sample.graph()
    (node,) = graph.nodes
    return kind(Call(node=node, tensors=graph.tensors))


def _widened(kind: str, dtype: torch.dtype) -> str:
    wide = str(dtype).removeprefix("torch.")
    for name in ("bfloat16", "float16", "float32", "float64"):
        kind = kind.replace(name, wide)
    return kind


def _sizes(call: Call) -> Iterator[dict[int, int]]:
    """Yield sizes of dims -> small sizes that differ where they differ; at last the call's own."""
    given = list(dict.fromkeys(s for t in call.ins for s in t.shape if s > 1))
    plain = [abs(a) for a in _numbers(_values(call)) if isinstance(a, int) and abs(a) > 1]
    common = [math.gcd(s, math.lcm(*plain)) if plain else 1 for s in given]
    fixed = {0: 0, 1: 1}
    for primes in _PRIMES:
        if len(given) <= len(primes):
            yield fixed | dict(zip(given, primes, strict=False))
            if any(c > 1 for c in common):
                yield fixed | {s: c * p for s, c, p in zip(given, common, primes, strict=False)}
    few = {s: s for s in given if s <= FEW}
    for primes in _PRIMES if few and len(given) <= len(_PRIMES[0]) else ():
        yield fixed | dict(zip(given, primes, strict=False)) | few
    if all(t is None or t.numel <= LARGEST for t in (*call.ins, *call.outs)):
        yield fixed | {s: s for s in given}


def _values(call: Call) -> tuple[Any, ...]:
    return *call.node.args, *(value for _, value in call.node.kwargs)


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, tuple) and not isinstance(value, Ref | Dtype):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _sample(
    call: Call, sizes: Mapping[int, int], dtype: torch.dtype, seed: int, scale: float = 1.0
) -> Sample:
    random = torch.Generator().manual_seed(seed)
    cut = [sizes[s] for t in call.ins if "float" in t.dtype for s in t.shape if s > 1]
    high = min(cut, default=3)
    made: dict[str, torch.Tensor] = {}

    def tensor(t: Described) -> torch.Tensor:
        shape = [sizes[s] for s in t.shape]
        if "float" in t.dtype:
            return (scale * torch.randn(shape, dtype=torch.float64, generator=random)).to(dtype)
        numbers = torch.randint(2 if t.dtype == "bool" else high, shape, generator=random)
        return numbers.to(getattr(torch, t.dtype))

    def arg(value: Any) -> Any:
        match value:
            case Ref():
                if value.name not in made:
                    made[value.name] = tensor(call.tensors[value.name])
                return made[value.name]
            case Dtype():
                return dtype if "float" in value.name else getattr(torch, value.name)
            case tuple():
                return [arg(v) for v in value]
            case str() if value.endswith("_format"):
                return getattr(torch, value)
        return value

    args = tuple(arg(a) for a in call.node.args)
    return Sample(call.node.op, args, {name: arg(a) for name, a in call.node.kwargs}, scale)


def resolved(op: str, where: str) -> Any:
    """Return the operator of a name; raise if its declaration rules out any row."""
    try:
        found = resolve(op)
        reason = operator_schemas.unsplittable(found)
    except (AttributeError, ValueError):
        raise UnsupportedOpError(
            f"there is no operator {op}",
            where=where,
            hint="write namespace.name.overload, as in aten.mm.default; a model's own operators "
            "are known with --model FILE",
        ) from None
    if reason:
        raise _unfit(op, where, reason)
    return found


def _steady(sample: Sample, where: str) -> list[tuple[int, ...] | None]:
    """Return the shapes of a sample's results; raise if they vary, or if its inputs change."""
    before = [t.clone() for t in sample.tensors.values()]
    torch.manual_seed(1)
    first = sample.run()
    if not all(map(torch.equal, before, sample.tensors.values())):
        raise _unfit(sample.op, where, "it writes into its inputs")
    kept = [t.clone() if isinstance(t, torch.Tensor) else t for t in first]
    torch.manual_seed(2)
    again = sample.run()
    if not all(t is None or isinstance(t, torch.Tensor) for t in first):
        raise _unfit(sample.op, where, "it returns something else than tensors")
    same = len(kept) == len(again) and all(
        (a is None and b is None)
        or (a is not None and b is not None and a.shape == b.shape
            and torch.allclose(a, b, equal_nan=True))
        for a, b in zip(kept, again, strict=True)
    )  # fmt: skip
    if not same:
        raise _unfit(sample.op, where, "it draws random numbers or keeps a state")
    return [None if t is None else tuple(t.shape) for t in kept]


def _unfit(op: str, where: str, reason: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"operator {op} can't be split: {reason}",
        where=where,
        hint="the results of the ranks would not make up the whole; compute it outside of the planned "
        "step, or with operators whose results depend on their inputs alone",
    )


# --- calls without a model ---


def calls_of(op: str) -> list[Call]:
    """Return calls of an operator, made from its schema: small sizes for each number of dims.

    Raises:
        UnsupportedOpError: as :func:`discovered`, or no valid sizes are found.
    """
    target = resolved(op, "")
    count = sum(operator_schemas.takes_tensor(a) for a in target._schema.arguments)
    found: list[Call] = []
    for ranks in sorted(itertools.product((2, 3, 1), repeat=count), key=sum):
        for whole in itertools.product((False, True), repeat=count):
            for pattern in _patterns(sum(ranks)):
                sample = _made_up(op, ranks, whole, pattern)
                try:
                    sample.run()
                    graph = sample.graph()
                except Exception:
                    continue  # the operator refuses these sizes or types
                (node,) = graph.nodes
                found.append(Call(node=node, tensors=graph.tensors))
                break
            else:
                continue
            break
        if len(found) >= 3:
            break
    if not found:
        raise UnsupportedOpError(
            f"no valid arguments were found for operator {op}",
            hint=f"hap rules discover {op} --model FILE uses the arguments of a model's calls",
        )
    return found


def _patterns(dims: int) -> list[tuple[int, ...]]:
    """Return all partitions of some dims into equal ones, those with most different dims first."""
    found: list[tuple[int, ...]] = [()] if dims <= 7 else []
    for _ in range(dims):
        found = [(*p, k) for p in found for k in range(max(p, default=-1) + 2)]
    return sorted(found, key=lambda p: -len(set(p)))[:300]


def _made_up(
    op: str, ranks: Sequence[int], whole: Sequence[bool], pattern: Sequence[int]
) -> Sample:
    random = torch.Generator().manual_seed(0)
    sizes, given = iter([_PRIMES[0][k] for k in pattern]), iter(zip(ranks, whole, strict=True))

    def tensor() -> torch.Tensor:
        rank, numbers = next(given)
        shape = [next(sizes) for _ in range(rank)]
        if numbers:
            return torch.randint(3, shape, generator=random)
        return torch.randn(shape, dtype=torch.float64, generator=random)

    args: list[Any] = []
    named: dict[str, Any] = {}
    for a in resolve(op)._schema.arguments:
        if operator_schemas.takes_tensor(a):
            value: Any = tensor()
        elif a.has_default_value():
            continue
        else:
            value = operator_schemas.plain_example(a)
        if a.kwarg_only:
            named[a.name] = value
        else:
            args.append(value)
    return Sample(op, tuple(args), named)


def calls_in(graph: Graph, op: str) -> list[Call]:
    """Return an operator's calls in a graph, one of each kind."""
    calls = [Call(node=node, tensors=graph.tensors) for node in graph.nodes if node.op == op]
    return list({kind(call): call for call in reversed(calls)}.values())[::-1]
