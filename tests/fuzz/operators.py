"""Draws the lines of a random module: each function adds one line, or a few related ones."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from tests.fuzz.grammar import NotApplicable, Scope, Shape

Operator = Callable[[Scope], None]

OPERATORS: dict[str, Operator] = {}
"""Name -> function. Those that create shapes and parameters come first: shrinking prefers them."""


def operator(function: Operator) -> Operator:
    OPERATORS[function.__name__.strip("_")] = function
    return function


def _at_least(rank: int) -> Callable[..., bool]:
    return lambda t: t.dim() >= rank


# --- products ---


@operator
def linear(s: Scope) -> None:
    v, out = s.value(_at_least(1)), s.size()
    weight = s.param(out, s.shape(v)[-1])
    bias = f", {s.param(out)}" if s.chance() else ""
    s.add(f"F.linear({v}, {weight}{bias})")


@operator
def matmul(s: Scope) -> None:
    v = s.value(_at_least(1))
    last = s.shape(v)[-1]
    s.add(f"{v} @ {s.param(last, s.size()) if s.chance() else s.param(last)}")


@operator
def scores(s: Scope) -> None:
    """A product of two values, like attention scores."""
    v = s.value(_at_least(2))
    same = s.shape(v)
    w = s.value(lambda t: t.dim() >= 2 and t.shape[-1] == same[-1] and t.dim() == len(same))
    s.add(f"{v} @ {w}.transpose(-1, -2)")


@operator
def batched(s: Scope) -> None:
    v = s.value(lambda t: t.dim() == 3)
    b, _, k = s.shape(v)
    s.add(f"torch.bmm({v}, {s.param(b, k, s.size())})")


@operator
def einsum(s: Scope) -> None:
    v = s.value(lambda t: t.dim() == 3)
    b, i, k = s.shape(v)
    spec, shape = s.one((
        ("bik,ko->bio", (k, 3)), ("bik,io->bko", (i, 5)), ("bik,bi->bk", (b, i)),
        ("bik,hkd->bhid", (2, k, 3)),
    ))  # fmt: skip
    s.add(f"torch.einsum({spec!r}, {v}, {s.param(*shape)})")


@operator
def attention(s: Scope) -> None:
    v = s.value(lambda t: t.dim() == 4)
    b, h, length, d = s.shape(v)
    options = s.one(("", ", is_causal=True", "mask"))
    if options == "mask":
        mask = s.input(s.one(((length, length), (b, 1, length, length))))
        options = f", attn_mask={mask}"
    keys = s.value(lambda t: tuple(t.shape) == (b, h, length, d))
    s.add(f"F.scaled_dot_product_attention({v}, {keys}, {v}{options})")


@operator
def conv1d(s: Scope) -> None:
    _conv(s, 1)


@operator
def conv2d(s: Scope) -> None:
    _conv(s, 2)


def _conv(s: Scope, n: int) -> None:
    v = s.value(lambda t: t.dim() == n + 2)
    channels, *space = s.shape(v)[1:]
    width = min(3, *space)
    groups = s.one([1, 1, *(g for g in (2, channels) if channels % g == 0)])
    out = groups * s.one((1, 2, 3, 5))
    weight = s.param(out, channels // groups, *(width for _ in range(n)))
    bias = s.param(out) if s.chance() else None
    stride, padding = s.one((1, 2)), s.one((0, 1))
    s.add(f"F.conv{n}d({v}, {weight}, {bias}, stride={stride}, padding={padding}, groups={groups})")


# --- norms and operators along a dim ---


@operator
def layer_norm(s: Scope) -> None:
    v = s.value(lambda t: t.dim() >= 1 and t.shape[-1] > 2)
    last = s.shape(v)[-1]
    affine = s.one(("", "weight", "both"))
    weight = f", {s.param(last)}" if affine else ""
    bias = f", {s.param(last)}" if affine == "both" else ""
    s.add(f"F.layer_norm({v}, ({last},){weight}{bias})")


@operator
def batch_norm(s: Scope) -> None:
    v = s.value(lambda t: t.dim() in (2, 3, 4) and t.numel() > 2 * t.shape[1])
    channels = s.shape(v)[1]
    affine = f"{s.param(channels)}, {s.param(channels)}" if s.chance() else "None, None"
    s.add(f"F.batch_norm({v}, None, None, {affine}, training=True, eps=0.1)")


@operator
def group_norm(s: Scope) -> None:
    v = s.value(lambda t: t.dim() >= 2 and t[0].numel() > 2 * t.shape[1])
    channels = s.shape(v)[1]
    groups = s.one([g for g in (1, 2, 3, channels) if channels % g == 0])
    affine = f"{s.param(channels)}, {s.param(channels)}" if s.chance() else "None, None"
    s.add(f"F.group_norm({v}, {groups}, {affine}, eps=0.1)")


@operator
def pool(s: Scope) -> None:
    v = s.value(lambda t: t.dim() == 4)
    if min(s.shape(v)[2:]) < 2:
        raise NotApplicable
    kind = s.one(
        ("F.max_pool2d({}, 2)", "F.avg_pool2d({}, 2)", "F.adaptive_avg_pool2d({}, (2, 1))")
    )
    s.add(kind.format(v))


@operator
def rms_norm(s: Scope) -> None:
    v = s.value(_at_least(1))
    weight = s.param(s.shape(v)[-1])
    s.add(f"{v} * torch.rsqrt({v}.pow(2).mean(-1, keepdim=True) + 0.1) * {weight}")


@operator
def along(s: Scope) -> None:
    v = s.value(_at_least(1))
    s.add(f"{v}.{s.one(('softmax', 'log_softmax', 'cumsum'))}({s.dim(v)})")


@operator
def reduced(s: Scope) -> None:
    v = s.value(_at_least(1))
    keep = ", keepdim=True" if s.chance() else ""
    kind = s.one(("sum", "mean", "amax", "amin", "logsumexp"))
    dims = {s.dim(v) % len(s.shape(v)) for _ in range(s.draw(st.integers(1, 2)))}
    s.add(f"{v}.{kind}({tuple(sorted(dims))}{keep})")


@operator
def ordered(s: Scope) -> None:
    v = s.value(_at_least(1))
    d = s.dim(v)
    s.add(s.one((f"{v}.sort({d})[0]", f"{v}.topk(1, {d})[0]", f"{v}.max({d})[0]", f"{v}.prod({d})",
                 f"{v}.cumprod({d})", f"{v}.norm(dim={d})")))  # fmt: skip


@operator
def triangle(s: Scope) -> None:
    v = s.value(_at_least(2))
    s.add(f"{v}.{s.one(('tril', 'triu'))}({s.draw(st.integers(-1, 1))})")


@operator
def spread(s: Scope) -> None:
    v = s.value(lambda t: t.dim() >= 1 and t.shape[-1] > 2)
    s.add(f"{v}.{s.one(('var', 'std'))}(-1, keepdim={s.chance()})")


# --- pointwise ---


@operator
def activation(s: Scope) -> None:
    kind = s.one((
        "torch.tanh", "torch.sigmoid", "F.relu", "F.gelu", "F.silu", "F.leaky_relu", "F.elu",
        "F.hardtanh", "F.softplus", "torch.sin", "torch.cos", "torch.abs", "torch.square",
        "torch.neg", "torch.erf", "F.hardswish", "F.dropout",
    ))  # fmt: skip
    s.add(f"{kind}({s.value()})")


@operator
def binary(s: Scope) -> None:
    v = s.value()
    kind = s.one(("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "{} / (1 + {} ** 2)"))
    pair = [v, s.other(s.shape(v))]
    s.add(kind.format(*(pair if s.chance() else pair[::-1])))


@operator
def scalar(s: Scope) -> None:
    kind = s.one(("{} * 0.5", "{} + 1", "1 - {}", "{} / 3", "-{}", "2.0 ** torch.tanh({})",
                  "{}.clamp(-1, 0.5)", "({} * {} + 1).sqrt()", "{} ** 3", "{}.exp()", "{}.float()"))  # fmt: skip
    v = s.value()
    s.add(kind.replace("{}", v))


@operator
def chosen(s: Scope) -> None:
    v = s.value()
    shape = s.shape(v)
    mask = s.input(s.shape_like(shape), "bool") if s.chance() else f"({s.other(shape)} > 0.1)"
    kind = s.one(("where", "where 0", "fill", "times"))
    s.add({
        "where": f"torch.where({mask}, {v}, {s.other(shape)})",
        "where 0": f"torch.where({mask}, 0.0, {v})",
        "fill": f"{v}.masked_fill({mask}, {s.one(('0.0', '-3.0'))})",
        "times": f"{v} * {mask}.to({v}.dtype)",
    }[kind])  # fmt: skip


# --- views ---


@operator
def reshape(s: Scope) -> None:
    v = s.value(_at_least(1))
    s.add(f"{v}.reshape({_regrouped(s, s.shape(v))})")


def _regrouped(s: Scope, shape: Shape) -> Shape:
    """Return a shape with the same elements: dims merged, split or regrouped."""
    at = s.draw(st.integers(0, len(shape) - 1))
    size = shape[at]
    match s.one(("merge", "split", "flat", "remix")):
        case "merge" if at + 1 < len(shape):
            return (*shape[:at], size * shape[at + 1], *shape[at + 2 :])
        case "flat":
            return (-1,)
        case "remix" if at + 1 < len(shape):
            return (*shape[:at], shape[at + 1], size, *shape[at + 2 :])
    factors = [f for f in range(1, size + 1) if size % f == 0]
    first = s.one(factors[1:-1] or factors)
    return (*shape[:at], first, size // first, *shape[at + 1 :])


@operator
def transpose(s: Scope) -> None:
    v = s.value(_at_least(2))
    s.add(f"{v}.transpose({s.dim(v)}, {s.dim(v)})")


@operator
def permute(s: Scope) -> None:
    v = s.value(_at_least(2))
    order = s.draw(st.permutations(range(len(s.shape(v)))))
    s.add(f"{v}.permute({tuple(order)})")


@operator
def ones(s: Scope) -> None:
    """Dims of size 1: created, dropped, expanded."""
    v = s.value()
    shape = s.shape(v)
    at = s.draw(st.integers(0, len(shape)))
    narrow = [d for d, size in enumerate(shape) if size == 1]
    match s.one(("unsqueeze", "squeeze", "squeeze one", "expand", "new and expanded")):
        case "unsqueeze":
            s.add(f"{v}.unsqueeze({at})")
        case "squeeze":
            s.add(f"{v}.squeeze()")
        case "squeeze one" if shape:
            s.add(f"{v}.squeeze({s.dim(v)})")
        case "expand" if narrow:
            d = s.one(narrow)
            s.add(f"{v}.expand({(*shape[:d], s.size(), *shape[d + 1 :])})")
        case _:
            s.add(f"{v}.unsqueeze({at}).expand({(*shape[:at], s.size(), *shape[at:])})")


@operator
def repeated(s: Scope) -> None:
    v = s.value(_at_least(1))
    d = s.dim(v)
    s.add(s.one((f"{v}.repeat_interleave(2, {d})", f"{v}.flip({d})", f"{v}.roll(1, {d})",
                 f"{v}.repeat({tuple(s.one((1, 2)) for _ in s.shape(v))})")))  # fmt: skip


@operator
def slice_(s: Scope) -> None:
    v = s.value(_at_least(1))
    d = s.dim(v, lambda size: size > 1) % len(s.shape(v))
    s.add(f"{v}[{_slice(s, s.shape(v), d)}]")


def _slice(s: Scope, shape: Shape, d: int) -> str:
    size = shape[d]
    start = s.draw(st.integers(0, size - 1))
    stop = s.draw(st.integers(start + 1, size))
    cut = s.one((f"{start}:{stop}", f"{start}:", f":{stop}", "::2", str(start), str(start - size)))
    return ", ".join([*(":" for _ in range(d)), cut])


@operator
def pad(s: Scope) -> None:
    v = s.value(_at_least(1))
    width = s.one(((1, 0), (0, 2), (1, 1), (-1, 1)))
    s.add(f"F.pad({v}, {width}, value={s.one((0.0, 0.5))})")


# --- several tensors ---


@operator
def cat(s: Scope) -> None:
    v = s.value(_at_least(1))
    shape = s.shape(v)
    d = s.dim(v) % len(shape)
    alike = s.value(
        lambda t: (
            t.dim() == len(shape)
            and all(k == d or a == b for k, (a, b) in enumerate(zip(t.shape, shape, strict=True)))
        )
    )
    new = s.param(*shape[:d], s.size(), *shape[d + 1 :])
    parts = s.one(((v, alike), (v, new), (new, v), (v, alike, v)))
    s.add(f"torch.cat([{', '.join(parts)}], {d})")


@operator
def stack(s: Scope) -> None:
    v = s.value()
    shape = s.shape(v)
    w = s.value(lambda t: tuple(t.shape) == shape)
    s.add(f"torch.stack([{v}, {w}], {s.draw(st.integers(0, len(shape)))})")


@operator
def parts(s: Scope) -> None:
    v = s.value(_at_least(1))
    d = s.dim(v, lambda size: size > 1)
    size = s.shape(v)[d]
    first = s.draw(st.integers(1, size - 1))
    cut = s.one(
        (f"split(({first}, {size - first}), {d})", f"chunk(2, {d})", f"split({first}, {d})")
    )
    names = [f"v{len(s.lines)}", f"w{len(s.lines)}"]
    s.run(f"{names[0]}, *_, {names[1]} = {v}.{cut}", names)


@operator
def unbind(s: Scope) -> None:
    v = s.value(_at_least(1))
    d = s.dim(v, lambda size: size > 1)
    names = [f"v{len(s.lines)}", f"w{len(s.lines)}"]
    s.run(f"{names[0]}, *_, {names[1]} = {v}.unbind({d})", names)


# --- lookups ---


@operator
def embedding(s: Scope) -> None:
    rows = max(2, s.size())
    index = s.input(tuple(s.size() for _ in range(s.draw(st.integers(1, 2)))), rows)
    padding = f", padding_idx={s.draw(st.integers(0, rows - 1))}" if s.chance() else ""
    s.add(f"F.embedding({index}, {s.param(rows, s.size())}{padding})")


@operator
def index_select(s: Scope) -> None:
    v = s.value(_at_least(1))
    d = s.dim(v)
    index = s.input((s.size(),), s.shape(v)[d])
    s.add(f"{v}.index_select({d}, {index})")


@operator
def index(s: Scope) -> None:
    v = s.value(_at_least(1))
    shape = s.shape(v)
    wide = tuple(s.size() for _ in range(s.draw(st.integers(1, 2))))
    i = s.input(wide, shape[0])
    if len(shape) > 1 and s.chance():
        s.add(
            s.one(
                (f"{v}[{i}, {s.input(wide[-1:], shape[1])}]", f"{v}[:, {s.input(wide, shape[1])}]")
            )
        )
    else:
        s.add(f"{v}[{i}]")


@operator
def gather(s: Scope) -> None:
    v = s.value(_at_least(1))
    shape = s.shape(v)
    d = s.dim(v) % len(shape)
    picked = s.input((*shape[:d], s.size(), *shape[d + 1 :]), shape[d])
    s.add(f"{v}.gather({d}, {picked})")


@operator
def scatter_add(s: Scope) -> None:
    v = s.value(_at_least(1))
    shape = s.shape(v)
    d, size = s.dim(v) % len(shape), s.size()
    to = s.input(shape, size)
    base = s.param(*shape[:d], size, *shape[d + 1 :])
    s.add(f"{base}.scatter_add({d}, {to}, {v})")


# --- in place ---


@operator
def in_place(s: Scope) -> None:
    v = s.value()
    if v.startswith("x"):
        raise NotApplicable
    shape = s.shape(v)
    change = s.one((
        f"{v}.add_({s.other(shape)})", f"{v}.mul_({s.other(shape)})", f"{v}.relu_()",
        f"{v}.mul_(0.5)", f"{v}.add_(1)", f"{v}.tanh_()", f"{v} += {s.other(shape)}",
        f"{v}.clamp_(-1, 0.5)",
    ))  # fmt: skip
    s.run(change, [])


@operator
def part_in_place(s: Scope) -> None:
    v = s.value(_at_least(1))
    if v.startswith("x"):
        raise NotApplicable
    d = s.dim(v, lambda size: size > 1) % len(s.shape(v))
    cut = _slice(s, s.shape(v), d)
    s.run(s.one((f"{v}[{cut}].mul_(0.5)", f"{v}[{cut}] = 0.25", f"{v}[{cut}].add_(1)")), [])
