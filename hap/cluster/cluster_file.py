"""Read a cluster from a yaml file, a typed hostfile, their text, or ``local`` / ``local:4``.

Every error names the line, the fault, and a correct alternative. docs/cluster-file.md
describes the format; :mod:`hap.cluster.hostfile` reads the other two forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from hap.cluster.catalogue import TYPICAL, find, nearest, typical_efficiency, typical_host_s
from hap.cluster.device import Device
from hap.cluster.figures import BY_KEY, FIGURES, RETIRED, Figure, warn_of_retired
from hap.cluster.hostfile import is_hostfile, local_cluster, read_hostfile
from hap.cluster.link import IMPLEMENTATIONS, LEVELS, Collectives, Link, MeasuredSet, unused
from hap.cluster.topology import Cluster, check_size
from hap.cluster.work import ELEMENTWISE
from hap.errors import ClusterError, reason_of
from hap.files import read_whole
from hap.units import parse

_FIGURES: Final = (*BY_KEY, *RETIRED, "source")
_BETWEEN_LATENCY_S: Final = 30e-6

_MOST_BITS: Final = 1000  # of a whole number: larger ones are no floats, and slow to print

LEAST_RATE: Final = 1e3
"""Lowest rate in bytes or operations per second; a lower one is a mistake in the unit."""


def load_cluster(text_or_path: str | Path) -> Cluster:
    """Read a cluster: a yaml file, a typed hostfile, their text, or ``local`` / ``local:4``.

    Raises:
        ClusterError: with the line in ``where`` and the remedy in ``hint``.
    """
    given = str(text_or_path)
    if given == "local" or given.startswith("local:"):
        return local_cluster(given)
    if "\n" in given:
        text, file, name = given, "<text>", "cluster"
    else:
        text, file, name = _read(Path(given)), Path(given).name, Path(given).stem
    if not given.endswith((".yaml", ".yml")) and is_hostfile(text):
        return read_hostfile(text, file, name)
    return _read_yaml(text, file, name)


def _read(path: Path) -> str:
    try:
        return read_whole(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "no text; save it as UTF-8"
        reason = "no such file" if isinstance(error, FileNotFoundError) else reason
        raise ClusterError(
            f"cannot read the cluster: {reason}", where=str(path),
            hint="give a yaml file, a hostfile, or `local` for the CPUs of this machine",
        ) from error  # fmt: skip


class _Constructor(RoundTripConstructor):
    """Names the line of a value that is none of its kind, such as the date ``2026-13-45``."""

    def construct_non_recursive_object(self, node: Any, tag: str | None = None) -> Any:
        try:
            found = super().construct_non_recursive_object(node, tag)
            if isinstance(found, int) and found.bit_length() > _MOST_BITS:
                raise ValueError("the number is too large")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"the {node.tag.rpartition(':')[2]} here cannot be read: {error}"
            raise ConstructorError(None, None, what, node.start_mark) from error
        return found


def _read_yaml(text: str, file: str, name: str) -> Cluster:
    yaml = YAML()  # the round-trip loader keeps line numbers
    yaml.Constructor = _Constructor
    try:
        data = yaml.load(text)
    except RecursionError:
        raise ClusterError("the yaml is nested too deep", where=file, hint="flatten it") from None
    except ReaderError as error:
        raise ClusterError(
            f"not valid yaml: the character #x{error.character:04x} is not allowed",
            where=f"{file}:{text.count(chr(10), 0, error.position) + 1}",
            hint="remove this control character",
        ) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ClusterError(
            f"not valid yaml: {error.problem or error.context}",
            where=f"{file}:{mark.line + 1}" if mark else file,
            hint="check indentation, colons and quotes on this line and the one above",
        ) from error
    top = _Section(data, f"{file}:1", file, ("name", "nodes", "links", "collectives"))
    links = top.section("links", ("between", "inside"))
    measured = top.section("collectives", (*IMPLEMENTATIONS, "among"))
    nodes = [
        _node(
            _Section(raw, where, file, ("name", "count", "gpus", "type", "inside", *_FIGURES)),
            links,
        )
        for raw, where in top.items("nodes")
    ]
    names = Counter(name for node in nodes for name in node.names)
    check_size(sum(len(n.names) * len(n.devices) for n in nodes), top.where("nodes"))
    for node in nodes:
        for own in node.names:
            if names[own] > 1:
                raise ClusterError(
                    f"two nodes are named {own!r}", where=node.where, hint="rename one of them"
                )
    devices = tuple(
        replace(device, name=f"{name}:{index}", node=name)
        for node in nodes
        for name in node.names
        for index, device in enumerate(node.devices)
    )
    intra = {name: node.link for node in nodes for name in node.names if node.devices}
    if not devices:
        raise ClusterError(
            "no node has a GPU", where=top.where("nodes"), hint="give at least one node gpus: 1"
        )
    return Cluster(
        name=str(top.get("name", name)),
        devices=devices,
        intra=intra,
        inter=_between(links, top, intra),
        collectives=_collectives(measured),
        among=tuple(
            _measured_set(_Section(raw, where, file, ("devices", *IMPLEMENTATIONS)), devices)
            for raw, where in (measured.items("among") if "among" in measured.data else ())
        ),
    )


def _measured_set(given: _Section, devices: Sequence[Device]) -> MeasuredSet:
    names, known = given.required("devices", "devices: [new:0, new:1]"), {d.name for d in devices}
    if not isinstance(names, list) or not 1 < len({*map(str, names)} & known) == len(names):
        raise ClusterError(
            f"devices is {str(names)[:60]}", where=given.where("devices"),
            hint=f"list two devices or more, such as {', '.join(sorted(known)[:2])}",
        )  # fmt: skip
    return MeasuredSet(frozenset(map(str, names)), _collectives(given))


def _collectives(every: _Section) -> Collectives:
    """Return measured links per collective, implementation and level."""
    found = {}
    for kind in (kind for kind in IMPLEMENTATIONS if kind in every.data):
        ways = every.section(kind, IMPLEMENTATIONS[kind])
        found[str(kind)] = {
            str(how): {
                str(level): _link(levels, level, 0.0, "least")
                for levels in (ways.section(how, LEVELS),)
                for level in levels.data
            }
            for how in ways.data
        }
    return found


def _between(links: _Section, top: _Section, intra: Mapping[str, Link]) -> Link:
    if "between" in links.data:
        return _link(links, "between", _BETWEEN_LATENCY_S)
    if len(intra) > 1:
        raise ClusterError(
            "several nodes, but no link between them", where=top.where("nodes"),
            hint="add links: {between: {bandwidth: 10 Gbit/s, latency: 30 us}}",
        )  # fmt: skip
    (link,) = intra.values()
    return unused(link)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """``count`` identical machines of the file."""

    names: tuple[str, ...]
    devices: tuple[Device, ...]
    link: Link
    where: str


def _node(node: _Section, links: _Section) -> _Node:
    name = str(node.get("name", "node"))
    count = node.count("count", at_least=1)
    raw = node.required("gpus", "gpus: 8 together with type: V100-16, or a list of GPUs")
    devices: list[Device] = []
    if isinstance(raw, (list, dict)):
        if "type" in node.data:
            raise ClusterError(
                "a node with a list of GPUs has no type of its own", where=node.where("type"),
                hint="write the type in each entry of the list: {type: V100-16, count: 4}",
            )  # fmt: skip
        for item, where in _gpus(node):
            item = {"type": item} if isinstance(item, (str, int)) else item
            gpu = _Section(item, where, node.file, ("type", "count", *_FIGURES))
            # Figures of the node apply to its GPUs, unless the entry itself overrides them.
            device = _figures(_figures(_pattern(gpu, (gpu, node)), node), gpu)
            devices += [device] * gpu.count("count", at_least=1)
    elif number := node.count("gpus", at_least=0):
        devices = [_figures(_pattern(node, (node,)), node)] * number
    return _Node(
        names=tuple(f"{name}-{i}" for i in range(count)) if count > 1 else (name,),
        devices=tuple(devices), link=_inside(node, links, devices), where=node.place,
    )  # fmt: skip


def _gpus(node: _Section) -> list[tuple[Any, str]]:
    """Return the entries of a list of GPUs, or of ``{A100-40: 4, V100-16: 8}`` or ``{type: A100-40, count: 4}``."""
    raw, where = node.data["gpus"], node.where("gpus")
    if not isinstance(raw, dict):
        return node.items("gpus")
    counts = [({"type": kind, "count": number}, where) for kind, number in raw.items()]
    return [(raw, where)] if "type" in raw else counts


def _inside(node: _Section, links: _Section, devices: list[Device]) -> Link:
    entries = [entry for device in devices if (entry := find(device.kind))]
    alike = len({device.kind for device in devices}) == 1
    links_of = [entry.inside(len(devices) if alike else 0) for entry in entries]
    slowest = min(links_of, key=lambda link: link.bandwidth_bytes_per_s, default=None)
    latency_s = slowest.latency_s if slowest else 10e-6
    for section in (node, links):
        if "inside" in section.data:
            return _link(section, "inside", latency_s)
    if len(devices) > 1 and not slowest:
        what = "the links between devices that are not in the catalogue are unknown"
        raise ClusterError(what, where=node.place, hint="add inside: {bandwidth: 10 GB/s}")
    # Without devices, or with only one, the link is never used.
    return slowest or Link(10e9, latency_s, "assumed: PCIe 3 x16")


def _link(section: _Section, key: str, latency_s: float, *more: str) -> Link:
    """Read ``10 Gbit/s``, or ``{bandwidth: 10 Gbit/s, latency: 30 us}``, and ``more`` keys."""
    place = section.where(key)
    if not isinstance(section.data[key], Mapping):
        return Link(section.quantity(key, "bytes/s"), latency_s, f"{place}; latency assumed")
    link = section.section(key, ("bandwidth", "latency", *more, "source"))
    link.required("bandwidth", "bandwidth: 10 Gbit/s")
    source = f"{link.data['source']} ({place})" if "source" in link.data else place
    if "latency" in link.data:
        latency_s = link.quantity("latency", "seconds", zero=True)
    else:
        source += "; latency assumed"
    least_s = link.quantity("least", "seconds", zero=True) if "least" in link.data else 0.0
    return Link(link.quantity("bandwidth", "bytes/s"), latency_s, source, least_s)


def _pattern(gpu: _Section, given: tuple[_Section, ...]) -> Device:
    """Return the type's device; a device without figures if the file itself gives them all."""
    kind = str(
        gpu.required("type", "type: V100-16 (the catalogue's names are in hap/cluster/gpus.yaml)")
    )
    if entry := find(kind):
        return entry.device
    rates = "flops: {float32: ..., float16: ..., bfloat16: ...} (those that it has)"
    needed = {"memory": "memory", "flops": rates, "memory_bandwidth": "memory_bandwidth"}
    missing = [text for key, text in needed.items() if not any(_states(s, key) for s in given)]
    if missing:
        near, needs = nearest(kind), ", ".join(missing)
        hint = f"give its {needs} here; docs/cluster-file.md has the names that are known"
        raise ClusterError(
            f"the catalogue does not know the GPU {kind!r}",
            where=gpu.where("type"),
            hint=f"did you mean {near}? Otherwise {hint}" if near else hint,
        )
    # Placeholders that the caller overwrites with the file's figures; the efficiencies follow these.
    return Device(
        name=kind, kind=kind, node="", memory_bytes=1, flops_per_s={"float32": 1.0},
        memory_bytes_per_s=1.0, launch_s=3e-6, host_s=typical_host_s(),
        efficiency=typical_efficiency(1.0, 1.0),
        source={"launch_s": "assumed", "host_s": TYPICAL, "efficiency": TYPICAL},
    )  # fmt: skip


def _states(section: _Section, key: str) -> bool:
    """Return whether a section gives a figure; for rates, at least that of float32."""
    value = section.data.get(key)
    return value is not None and (not isinstance(value, Mapping) or "float32" in value)


def _figures(device: Device, given: _Section) -> Device:
    """Return the device with a section's figures, each with its line as the source."""
    warn_of_retired(given.data, given.file)
    stated = [figure for figure in FIGURES if figure.key in given.data]
    values = {figure.path: _value(figure, figure.of(device), given) for figure in stated}
    source = dict(device.source)
    for figure in stated:
        place = given.where(figure.key)
        told = given.data.get("source")
        if isinstance(told, Mapping):  # one text per key
            told = given.section("source", _FIGURES).data.get(figure.key)
        names = [figure.name]
        if figure.key == "flops":
            named = given.data[figure.key]
            dtypes = named if isinstance(named, Mapping) else values[figure.path]
            names = [f"{figure.name}.{dtype}" for dtype in dtypes]
        source |= dict.fromkeys(names, f"{told} ({place})" if told else place)
    found = device.changed(values, source=source)
    return found.changed({"efficiency": _typical_work(device, found, given)})


def _typical_work(before: Device, after: Device, given: _Section) -> dict[str, float]:
    """Return the efficiencies of a device; the typical ones of elementwise work follow its memory.

    They are per byte that the memory moves (``gpus.yaml``), and a section may state another rate of the
    memory, or of the products, to which efficiencies are relative.
    """
    if before.source.get("efficiency") != TYPICAL:
        return dict(after.efficiency)
    stated = given.data.get("efficiency", {})
    memory = after.memory_bytes_per_s / before.memory_bytes_per_s
    products = after.flops_per_s["float32"] / before.flops_per_s["float32"]
    return {
        kind: value if kind in stated or kind not in ELEMENTWISE else value * memory / products
        for kind, value in after.efficiency.items()
    }


def _value(figure: Figure, before: Any, given: _Section) -> Any:
    """Return the value of a figure that a section gives, merged with the previous value."""
    key = figure.key
    if figure.key == "flops" and not isinstance(given.data[key], Mapping):
        # A single rate is that of float32; the other dtypes keep their ratio to it.
        scale = given.quantity(key, figure.dimension) / before["float32"]
        return {dtype: rate * scale for dtype, rate in before.items()}
    if not figure.by:
        found = _number(figure, given, key)
        return round(found) if key == "memory" else found
    part = given.section(key, figure.by)
    return {**before, **{str(entry): _number(figure, part, entry) for entry in part.data}}


def _number(figure: Figure, given: _Section, key: str) -> float:
    """Return a number or quantity; zero is accepted if the figure's own range decides on it."""
    if not figure.dimension:
        return given.number(key, zero=not figure.by)
    return given.quantity(key, figure.dimension, zero=figure.possible(0.0))


class _Section:
    """A mapping of the file with its line numbers and its permitted keys."""

    def __init__(self, data: Any, place: str, file: str, keys: tuple[str, ...]) -> None:
        if not isinstance(data, Mapping):
            what = "is empty" if data is None else f"is {str(data)[:40]!r}"
            raise ClusterError(
                f"keys are expected here, but it {what}",
                where=place,
                hint=f"write `key: value` lines; known keys: {', '.join(keys)}",
            )
        self.data = data
        self.place = place
        self.file = file
        for key in data:
            if key not in keys:
                keys = tuple(known for known in keys if known not in RETIRED)
                near = get_close_matches(str(key), keys, n=1, cutoff=0.5)
                raise ClusterError(
                    f"unknown key {str(key)!r}",
                    where=self.where(key),
                    hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(keys)}",
                )

    def where(self, key: str) -> str:
        """Return ``file:line`` of a key; of the mapping for a key that it lacks or merges (``<<``)."""
        lines = getattr(self.data, "lc", None)
        written = lines and key in (lines.data or ())
        return f"{self.file}:{lines.key(key)[0] + 1}" if lines and written else self.place

    def get(self, key: str, default: object) -> object:
        value = self.data.get(key)
        return default if value is None else value

    def required(self, key: str, example: str) -> object:
        if self.data.get(key) is None:
            raise ClusterError(
                f"{key!r} is missing", where=self.where(key), hint=f"write {example}"
            )
        return self.data[key]

    def section(self, key: str, keys: tuple[str, ...]) -> _Section:
        """Return the mapping under a key; an empty one if there is no such key."""
        if key not in self.data:
            return _Section({}, self.place, self.file, keys)
        return _Section(self.data[key], self.where(key), self.file, keys)

    def items(self, key: str) -> list[tuple[Any, str]]:
        """Return the entries of the list under a key, each with its line."""
        values = self.required(key, f"{key}: and a list below it")
        if not isinstance(values, list) or not values:
            raise ClusterError(
                f"{key!r} is not a list with entries", where=self.where(key),
                hint=f"write each entry of {key!r} on its own line after a dash",
            )  # fmt: skip
        lines = getattr(values, "lc", None)
        places = (
            f"{self.file}:{lines.item(i)[0] + 1}" if lines else self.place
            for i in range(len(values))
        )
        return list(zip(values, places, strict=True))

    def count(self, key: str, at_least: int) -> int:
        value = self.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ClusterError(
                f"{key} is {value!r}", where=self.where(key),
                hint=f"write a whole number >= {at_least}",
            )  # fmt: skip
        check_size(value, self.where(key))
        return value

    def number(self, key: str, *, zero: bool = False) -> float:
        value = self.data[key]
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not (value > 0 or (zero and value == 0)):
            raise ClusterError(
                f"{key} is {value!r}", where=self.where(key), hint="write a positive number"
            )
        return float(value)

    def quantity(self, key: str, dimension: str, *, zero: bool = False) -> float:
        """Return a quantity with its unit, above zero, or at zero with ``zero``."""
        try:
            value = parse(self.data[key], dimension)
        except ValueError as error:
            what, _, hint = str(error).partition(": ")
            raise ClusterError(f"{key}: {what}", where=self.where(key), hint=hint) from error
        if value < 0 or (value == 0 and not zero):
            hint = f"it must be {'zero or more' if zero else 'above zero'}"
            raise ClusterError(f"{key} is {self.data[key]}", where=self.where(key), hint=hint)
        if 0 < value < LEAST_RATE and dimension.endswith("/s"):
            raise ClusterError(
                f"{key} is {self.data[key]}, slower than any device", where=self.where(key),
                hint="check the unit: rates are in B/s, GB/s, Gbit/s, GFLOP/s, ...",
            )  # fmt: skip
        return value
