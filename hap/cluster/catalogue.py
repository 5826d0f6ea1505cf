"""The catalogue of known GPUs (``gpus.yaml``): names, and figures with their provenance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from ruamel.yaml import YAML

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.units import parse

_FILE: Final[Path] = Path(__file__).with_name("gpus.yaml")


TYPICAL: Final = "catalogue: typical"
"""The source of figures that are alike on all GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kind of device."""

    device: Device  # a pattern: named after its kind, in no node; figures are effective
    link: Link  # between two such devices in one machine
    peak: Mapping[str, float]  # the vendor's: per dtype, and memory_bandwidth; empty for the cpu


def find(name: str) -> Entry | None:
    """Return the entry of a name or alias; case, spaces, ``-`` and ``_`` do not matter."""
    kind = _names().get(_key(name))
    return None if kind is None else catalogue()[kind]


def nearest(name: str) -> str | None:
    """Return the known name most similar to an unknown one."""
    match = get_close_matches(_key(name), _names(), n=1, cutoff=0.5)
    return _names()[match[0]] if match else None


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
        share, like = _share(figure, raw.get("like"), fitted)
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
    # The memory limits elementwise work: its figures are per byte that the memory moves.
    elementwise = {} if not peak else {
        k: round(float(v) * bandwidth / rates["float32"], 6) for k, v in typical["elementwise"].items()
    }  # fmt: skip
    device = Device(
        name=kind,
        kind=kind,
        node="",
        memory_bytes=round(parse(raw["memory"], "bytes")),
        flops_per_s=rates,
        memory_bytes_per_s=bandwidth,
        launch_s=parse(typical["launch"], "seconds"),
        efficiency={k: float(v) for k, v in typical["efficiency"].items()} | elementwise,
        source={
            "memory_bytes": f"catalogue: {raw['datasheet']}",
            **{f"flops_per_s.{dtype}": origin[dtype] for dtype in rates},
            "memory_bytes_per_s": origin["memory_bandwidth"],
            "launch_s": TYPICAL,
            "efficiency": TYPICAL,
        },
    )
    link = Link(
        parse(raw["link"], "bytes/s"),
        parse(typical["link_latency"], "seconds"),
        f"catalogue: typical of machines with {kind}",
    )
    return Entry(device=device, link=link, peak=peak)


def like(kind: str) -> str | None:
    """Return the kind whose fractions of the peak replace figures that were not fitted."""
    return cast("str | None", _data()["gpus"][kind].get("like"))


def _share(
    figure: str, like: str | None, fitted: Mapping[str, Mapping[str, float]]
) -> tuple[float, str]:
    """Return the expected fraction of the vendor's peak, and its source."""
    # Half precisions are fitted as float16 only.
    measured = "float16" if figure == "bfloat16" else figure
    if like and measured in fitted.get(like, {}):
        return fitted[like][measured] / _peak(_data()["gpus"][like])[measured], f"as {like} reaches"
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
        for alias in (kind, *entry["aliases"])
    }


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
