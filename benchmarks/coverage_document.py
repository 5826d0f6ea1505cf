"""Write docs/models.md from the results of :mod:`benchmarks.coverage`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.coverage_results import LIMIT_S, Found, counts, entries

INTRODUCTION = """\
# Models

Which models `hap plan` and `hap verify` were run on, written by

    python -m benchmarks.coverage
    python -m benchmarks.coverage --write-docs

*Verified*: a tiny model of the architecture, built from its configuration with random weights, gave
the losses, the gradients and the parameters after three steps of one device to {tolerance} in
float64. It did so on emulated ranks, under a random plan with random shares for each of 2, 3, 4 and
5 ranks, and under the plan that was made for a random cluster of unlike devices. *Planned*: the
published size on eight devices of two kinds (`benchmarks/clusters/unlike8.yaml`), in seconds of one
process from the module to the plan, on two cores; processor seconds in brackets.
Models are those of `transformers`, `torchvision` and `timm`, unmodified, or those that `{zoo}`
defines. `torchvision` and `timm` are the extra `zoo`; without them their rows are left as they are.
An empty cell was not run.

{counts}.
"""

ENDING = """\
## What is not supported

| model | reason |
|---|---|
| Switch Transformers of `transformers`, and experts run one after the other (`eager`) | \
which tokens an expert gets is looked up in the data (`nonzero`): shapes depend on it. The \
`batched_mm` form of Mixtral and Qwen2-MoE, and experts with room for a fixed number of tokens, are \
one program |
| layers left out by chance (`layerdrop`), spectra masked by numpy (`apply_spec_augment`) | \
the forward depends on random numbers that Python reads; set them to 0 and False |
| stochastic depth (`drop_path_rate`) above 0 | planned, not verified: no two masks agree |
| losses over sequences of data-dependent length (CTC) | `masked_select` has no fixed shape |
"""


def document(results: Mapping[str, Found]) -> str:
    known = entries()
    parts = [
        INTRODUCTION.format(
            tolerance="1e-9", zoo="benchmarks/zoo/native.py", counts=counts(dict(results))
        )
    ]
    for family in dict.fromkeys(entry.family for entry in known.values()):
        rows = [
            _row(entry, results.get(entry.name, {}))
            for entry in known.values()
            if entry.family == family
        ]
        head = "| model | special features | verified | parameters | operators | planned |"
        parts.append(
            f"## {family[0].upper()}{family[1:]}\n\n{head}\n|---|---|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    reasons = list(_reasons(results))
    if reasons:
        parts.append("## Failures\n\n" + "\n".join(reasons) + "\n")
    return "\n".join([*parts, ENDING])


def _row(entry: Any, found: Found) -> str:
    verified, planned = found.get("verify", {}), found.get("plan", {})
    cells = [
        entry.name,
        entry.brings,
        f"{verified['error']:.0e}" if verified.get("ok") else "no" if verified else "",
        f"{planned['parameters'] / 1e6:.1f} M" if planned.get("ok") else "",
        f"{planned['nodes']}" if planned.get("ok") else "",
        f"{planned['wall_s']:.0f} s ({planned['cpu_s']:.0f})"
        if planned.get("ok")
        else "no"
        if planned
        else "",
    ]
    return f"| {' | '.join(cells)} |"


def _reasons(results: Mapping[str, Found]) -> Any:
    for name in entries():
        for what, found in results.get(name, {}).items():
            if not found["ok"]:
                yield f"- {name}, {what}: {found['reason']}"
            elif found.get("wall_s", 0.0) > LIMIT_S:
                yield f"- {name}: planning took longer than {LIMIT_S:.0f} s"
