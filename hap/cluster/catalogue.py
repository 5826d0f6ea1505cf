"""The catalogue of known GPUs (``gpus.yaml``): names, and figures with their provenance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from ruamel.yaml import YAML

from hap.cluster.device import USABLE_MEMORY, Device
from hap.cluster.link import Link
from hap.units import parse

_FILE: Final[Path] = Path(__file__).with_name("gpus.yaml")
_VENDOR: Final = re.compile(r"^((nvidia|tesla|geforce|quadro|amd|instinct)[\s_-]*)+", re.IGNORECASE)
_SIZED: Final = re.compile(r"(?P<name>.+?)[\s_-]+(?P<gigabytes>\d+)\s*Gi?B?", re.IGNORECASE)
_SIZE_ERROR: Final = 0.15  # of a memory in a name: the driver's total is less than the vendor's
# The words of a name beside its model. A number of four digits is a model, such as RTX 4090.
_SIZE: Final = re.compile(r"x?(\d{1,3})(?:gi?b?)?")
_FORM: Final = re.compile(r"(sxm|pcie|nvl)\d?|hbm\d\w?")
_PARTS: Final = re.compile(r"^[rg]tx(?=[a-z]?\d)|(?<=\d{4})(?:ti|super)$|(?<=\d)x\d+$")

TYPICAL: Final = "catalogue: typical"
"""The source of figures that are alike on all GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kind of device."""

    device: Device  # a pattern: named after its kind, in no node; figures are effective
    link: Link  # between the devices of one machine
    pair: Link  # between the devices of a machine that has two: bridges may join them
    peak: Mapping[str, float]  # the vendor's: per dtype, and memory_bandwidth; empty for the cpu

    def inside(self, count: int) -> Link:
        """Return the link inside a machine with a number of devices."""
        return self.pair if count == 2 else self.link


def find(name: str) -> Entry | None:
    """Return the entry of a name or alias; case, spaces, ``-``, ``_`` and the vendor do not matter.

    A name may end with the card's memory: ``RTX 4090 24GB``.
    """
    kind = _names().get(_key(name))
    sized = None if kind else _SIZED.fullmatch(name.strip())
    if sized and (plain := _names().get(_key(sized["name"]))):
        total = parse(_data()["gpus"][plain]["memory"], "bytes")
        fits = abs(int(sized["gigabytes"]) * 2**30 / total - 1) < _SIZE_ERROR
        kind = plain if fits else None
    return None if kind is None else catalogue()[kind]


def nearest(name: str) -> str | None:
    """Return the kind of the same model and the nearest form and memory; ``None`` if there is none.

    A100-40 is near to ``A100-SXM``. No kind is near to a part of a GPU (MIG), to the variant of a
    laptop, or to an unknown model: it may differ in all of its figures.
    """
    wanted = _Words.of(name)
    found = []
    for kind, entry in _data()["gpus"].items():
        names = [_Words.of(alias) for alias in (kind, *entry.get("aliases", ()))]
        forms = {words.form for words in names} - {""}
        alike = [words for words in names if words.model == wanted.model]
        if alike and (not wanted.form or not forms or wanted.form in forms):
            sizes = [words.gigabytes or 0 for words in alike]
            error = min(abs(size - wanted.gigabytes) for size in sizes) if wanted.gigabytes else 0
            found.append((error, kind))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def typical_efficiency(memory_bytes_per_s: float, float32_flops_per_s: float) -> dict[str, float]:
    """Return the efficiencies that are alike on all GPUs, relative to a device's products.

    The memory limits elementwise work: the catalogue's figures are per byte that the memory moves.
    """
    typical = _data()["typical"]
    elementwise = {
        kind: round(float(value) * memory_bytes_per_s / float32_flops_per_s, 6)
        for kind, value in typical["elementwise"].items()
    }
    return {kind: float(value) for kind, value in typical["efficiency"].items()} | elementwise


def typical_host_s() -> float:
    """Return the seconds in which the host of a GPU issues one operator."""
    return parse(_data()["typical"]["host"], "seconds")


@cache
def catalogue() -> dict[str, Entry]:
    """Return all entries by kind."""
    raw = _data()["gpus"]
    fitted = {kind: _rates(entry.get("fitted", {})) for kind, entry in raw.items()}
    return {kind: build(kind, fitted) for kind in raw}


def build(kind: str, fitted: Mapping[str, Mapping[str, float]]) -> Entry:
    """Return one entry, given the fitted figures of all kinds (a fit starts without its own)."""
    raw, typical = _data()["gpus"][kind], _data()["typical"]
    rates = _rates(raw.get("rough", {}))
    origin = dict.fromkeys(rates, "catalogue: rough")
    peak = _peak(raw)
    for figure, value in peak.items():
        share, like = _share(figure, raw, fitted)
        rates[figure] = value * share
        origin[figure] = f"catalogue: vendor peak x {share:.2f}, {like} ({raw['datasheet']})"
    own = fitted.get(kind, {})
    rates |= own
    origin |= dict.fromkeys(own, f"catalogue: fitted to measured {raw.get('measured', 'layers')}")
    if "tfloat32" in own:
        origin["tfloat32"] = "catalogue: fitted to measured operators"
    if "float16" in own and peak.get("bfloat16") == peak["float16"]:
        # Tensor cores multiply both half precisions at the same rate.
        rates["bfloat16"], origin["bfloat16"] = own["float16"], f"{origin['float16']} in float16"
    bandwidth = rates.pop("memory_bandwidth")
    own_efficiency = {k: float(v) for k, v in typical["efficiency"].items()}
    if peak:
        own_efficiency = typical_efficiency(bandwidth, rates["float32"])
    memory_bytes, told = parse(raw["memory"], "bytes"), f"catalogue: {raw['datasheet']}"
    if peak:
        memory_bytes *= USABLE_MEMORY
        told = f"catalogue: {USABLE_MEMORY:.0%} of the driver's {raw['memory']}"
    device = Device(
        name=kind,
        kind=kind,
        node="",
        memory_bytes=round(memory_bytes),
        flops_per_s=rates,
        memory_bytes_per_s=bandwidth,
        launch_s=parse(typical["launch"], "seconds"),
        host_s=typical_host_s() if peak else 0.0,
        efficiency=own_efficiency,
        source={
            "memory_bytes": told,
            **{f"flops_per_s.{dtype}": origin[dtype] for dtype in rates},
            "memory_bytes_per_s": origin["memory_bandwidth"],
            "launch_s": TYPICAL,
            **({"host_s": TYPICAL} if peak else {}),
            "efficiency": TYPICAL,
        },
    )
    link = Link(
        parse(raw["link"], "bytes/s"),
        parse(typical["link_latency"], "seconds"),
        f"catalogue: typical of machines with {kind}",
    )
    pair = link
    if "pair" in raw:
        pair = replace(link, bandwidth_bytes_per_s=parse(raw["pair"], "bytes/s"))
    return Entry(device=device, link=link, pair=pair, peak=peak)


def like(kind: str) -> str | None:
    """Return the kind whose fractions of the peak replace figures that were not fitted."""
    return cast("str | None", _data()["gpus"][kind].get("like"))


def _share(
    figure: str, raw: Mapping[str, Any], fitted: Mapping[str, Mapping[str, float]]
) -> tuple[float, str]:
    """Return the expected fraction of the vendor's peak, and its source."""
    if figure in raw.get("share", {}):
        return float(raw["share"][figure]), "as published products reach"
    # Half precisions are fitted as float16 only.
    measured = "float16" if figure == "bfloat16" else figure
    while "like" in raw:
        like, raw = raw["like"], _data()["gpus"][raw["like"]]
        if measured in fitted.get(like, {}):
            return fitted[like][measured] / _peak(raw)[measured], f"as {like} reaches"
    return float(_data()["typical"]["share_of_peak"][figure]), "typical of the fitted GPUs"


def _peak(raw: Mapping[str, Any]) -> dict[str, float]:
    if "peak" not in raw:
        return {}
    return _rates({**raw["peak"], "memory_bandwidth": raw["memory_bandwidth"]})


def _rates(texts: Mapping[str, str]) -> dict[str, float]:
    return {
        figure: parse(text, "bytes/s" if figure == "memory_bandwidth" else "flop/s")
        for figure, text in texts.items()
    }


@cache
def _data() -> dict[str, Any]:
    return dict(YAML(typ="safe", pure=True).load(_FILE))


@cache
def _names() -> dict[str, str]:
    return {
        _key(alias): kind
        for kind, entry in _data()["gpus"].items()
        for alias in (kind, *entry.get("aliases", ()))
    }


def _key(name: str) -> str:
    sized = re.sub(
        r"(?<![a-z\d])(\d+)\s*gi?b?(?![a-z])", r"\1", _VENDOR.sub("", name.strip()).lower()
    )
    return re.sub(r"[\s_-]", "", sized)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The parts of a name: ``NVIDIA A100-SXM4-80GB`` is the model A100 in the form SXM with 80 GB."""

    model: frozenset[str]
    form: str
    gigabytes: int | None

    @classmethod
    def of(cls, name: str) -> _Words:
        words = re.findall(r"[^\s_,()-]+", _VENDOR.sub("", name.strip()).lower())
        words = [part for word in words for part in _PARTS.sub(r" \g<0> ", word).split()]
        sizes = [int(found[1]) for word in words if (found := _SIZE.fullmatch(word))]
        forms = [found[1] for word in words if (found := _FORM.fullmatch(word))]
        rest = [w for w in words if not _SIZE.fullmatch(w) and not _FORM.fullmatch(w)]
        return cls(
            model=frozenset(rest),
            form=next(filter(None, forms), ""),
            gigabytes=next(iter(sizes), None),
        )
