"""Write docs/models.md from the results of :mod:`benchmarks.coverage`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.coverage_results import (
    KINDS,
    LIMIT_S,
    Found,
    counts,
    entries,
    figures,
    read_every,
    read_operators,
)
from hap.runtime.verify import TOLERANCE

INTRODUCTION = """\
# Models

Architectures that `hap plan` and `hap verify` were run on. These commands write this page:

    python -m benchmarks.coverage
    python -m benchmarks.coverage --write-docs

*Verified*: a tiny model of the architecture, built from its configuration with random weights, has
the losses, the gradients and, after three steps, the parameters of one device to {tolerance} in
float64. The table has its largest error, on emulated ranks, under a random plan with random shares
for each of 2, 3, 4 and 5 ranks, and under the plan for a random cluster of unlike devices. A larger error is at most four times
what one device's own results move if its weights change in the last place (see [verify](python-api.md#verify)).
*Planned*: the published size (of mixtures of experts and `mamba` 2 or 4 layers, of gpt-oss, DeepSeek-V3 and Llama 4 also fewer experts) on eight devices of two kinds (`benchmarks/clusters/unlike8.yaml`),
without memory for its weights, in seconds from the module to the plan, one model after the other on
two cores; the processor seconds of all its processes in brackets. Importing the model's package and
building the model come before, and have a line of their own. The 65 entries of `transformers` (but for `fnet`), `peft`, `diffusers` and the libraries
after it in the list below, and `bert-moe` and `nn.Transformer`, were planned on 30 November 2026, in one go and by one commit, on a quiet machine (Python adds twenty million integers in 1.3 to 1.6 s).
Two of them failed then and were planned again after the mend: layers recomputed beside LoRA, and prompt tuning. Eleven were planned again on 1 December 2026, in one go and by one commit (58d3513), which recomputes activations
and takes microbatches where memory is short: blip-2, falcon, internvl, llama, mistral, paligemma, qwen2-vl, qwen2.5-vl, qwen3-vl, stable diffusion 3 and wan. That go was ended
before llava and gemma3; llava was planned the evening before. DoRA, which takes more than 200 processor seconds now (11.6 -> 3.8 s a step), and others that are short of memory were not planned again.
The other entries are older, of several commits and machines: `fno` and `fnet` were planned on one that takes about twice as long, timm's and torchvision's
of most seconds on 28 November 2026, in one go, on one that takes 1.4 to 1.9 times as long. 90 architectures with batch norm, group norm or images of
other sizes were verified again when these became kernels of torch.

Models are those of `transformers`, `torchvision`, `timm`, `diffusers`, `monai`, `segmentation-models-pytorch`, `open_clip`,
`torch_geometric` and `x-transformers`, unmodified, adapters of `peft`, or those that `benchmarks/zoo` defines. `transformers` is
the extra `models`, `torchvision` and `timm` are the extra `zoo`, the others the extra `libraries`; without a package the results of
its rows stay as they are. An empty cell was not run.

## Summary

{counts}.

| figure | seen | target |
|---|---|---|
{figures}
"""

EVERY = """\
## Every model of transformers, by kind

`python -m benchmarks.every_transformer` builds each architecture that `transformers` {version} lists as one of these kinds,
with small sizes that follow from the names of its configuration's fields, and without `layerdrop` and `apply_spec_augment` (see below). One random plan on three emulated ranks is compared with one device
in float64; the largest error is {worst}{amplified}. A model that does not train by itself at these sizes, because
they do not suit it or its batch is of another form, is counted apart; of models from image and text to text those are most, since each has a form of its own.
Results are of several commits: heads and language models of one day, heads that failed once more after a mend, images, videos and sound before, some at other sizes.

| kind | listed | run | verified | not verified | does not train at these sizes |
|---|---|---|---|---|---|
{table}

{failed}
"""

OPERATORS = """\
## Every operator of torch's tests

`python -m benchmarks.every_operator` makes a model of each differentiable operator that torch lists for its own tests (`OpInfo`): the
operator's inputs, times trained numbers, and the sum of the squares of its results. Random plans on two and three emulated ranks are compared with
one device in float64, for two of torch's inputs each. An operator whose model does not train by itself on these inputs is counted apart.

| listed | verified | not verified | does not train on its inputs | largest error |
|---|---|---|---|---|
| {listed} | {verified} | {failed} | {alone} | {worst} |

{reasons}
"""

ENDING = """\
## Unsupported models

| model | reason |
|---|---|
| Switch Transformers of `transformers`, and other experts that are no module of its common interface | \
the loop is over the experts that got tokens (`nonzero`), which are data. Experts of the interface, experts with room for a \
fixed number of tokens, and a loop over all experts are one program |
| positions read from a tensor (MoCo's queue), sizes that are the largest of some lengths, branches on data | \
shapes depend on data; [troubleshooting](troubleshooting.md#the-forward-cant-be-captured-as-one-graph) says what to write |
| layers left out by chance (`layerdrop`), spectra masked by numpy (`apply_spec_augment`) | \
the forward depends on random numbers that Python reads; set them to 0 and False |
| Qwen-VL, GLM-4V and others that are told the sizes of images (`image_grid_thw`), where the sizes change | \
shapes depend on that tensor; with images of fixed sizes, name it in [`fixed`](model-file.md#fixed-entries), and give `position_ids` in the batch |
| `flex_attention` | torch has no backward of it on a CPU, where plans are made and verified; \
`scaled_dot_product_attention` takes masks and biases |
| PaliGemma without `token_type_ids` | `transformers` leaves out the causal mask in eager mode and has it under `torch.compile`, whose loss is that of the program; `hap verify` \
reports the difference. With `token_type_ids`, as its processor makes them, it verifies |
| DiffLlama in float64 | its forward sums in float32, so that results of equal programs differ by 1e-8; `hap verify --dtype float32` has the room for it |
| SmolVLM and Idefics 3 | images that are padding are left out by their data (`nonzero`) |
"""


MET = {True: ": met", False: ": missed"}


def document(results: Mapping[str, Found]) -> str:
    known = entries()
    lines = (
        f"| {f.name} | {f.seen} | {f.target}{'' if f.met is None else MET[f.met]} |"
        for f in figures(dict(results))
    )
    parts = [
        INTRODUCTION.format(
            tolerance=f"{TOLERANCE['float64']:.0e}",
            counts=counts(dict(results)),
            figures="\n".join(lines),
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
    slow = list(_slow(results))
    if slow:
        parts.append(f"## Planned in more than {LIMIT_S:.0f} s\n\n{', '.join(slow)}.\n")
    return "\n".join(
        [*parts, every_transformer(read_every()), every_operator(read_operators()), ENDING]
    )


def every_transformer(results: Mapping[str, Mapping[str, Found]]) -> str:
    """Return the section on :mod:`benchmarks.every_transformer`."""
    if not results:
        return ""
    rows, others, errors = [], [], []
    for kind, label in KINDS.items():
        if kind not in results:
            continue
        found = results[kind]
        fine = [one for one in found.values() if one.get("ok")]
        alone = [one for one in found.values() if "alone" in one]
        errors += [one["error"] for one in fine]
        rows.append(
            f"| {label} | {results['transformers']['listed'][kind]} | {len(found)} | {len(fine)} | {len(found) - len(fine) - len(alone)} | {len(alone)} |"
        )
        others += [
            f"| {name} | {label} | {one['reason']} |".replace("\n", " ")
            for name, one in sorted(found.items()) if one.get("ok") is False
        ]  # fmt: skip
    version = results["transformers"]["version"]["number"]
    table = "\n".join(rows)
    failed = (
        "\n".join(["| configuration | kind | reason |", "|---|---|---|", *others]) if others else ""
    )
    tolerance = TOLERANCE["float64"]
    worst = f"{max((e for e in errors if e <= tolerance), default=0.0):.0e}"
    amplified = [e for e in errors if e > tolerance]
    more = (
        f", but for {len(amplified)} that amplify rounding, up to {max(amplified):.0e}"
        if amplified
        else ""
    )
    return EVERY.format(version=version, table=table, worst=worst, amplified=more, failed=failed)


def every_operator(results: Mapping[str, Found]) -> str:
    """Return the section on :mod:`benchmarks.every_operator`."""
    if not results:
        return ""
    errors = [found["error"] for found in results.values() if found.get("ok")]
    failed = {n: found["reason"] for n, found in results.items() if found.get("ok") is False}
    lines = ["| operator | reason |", "|---|---|", *(f"| {n} | {r} |" for n, r in failed.items())]
    return OPERATORS.format(
        listed=len(results), verified=len(errors), failed=len(failed),
        alone=sum("alone" in found for found in results.values()),
        worst=f"{max(errors, default=0.0):.0e}", reasons="\n".join(lines) if failed else "",
    )  # fmt: skip


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


def _reasons(results: Mapping[str, Found]) -> Iterator[str]:
    for name in entries():
        for what, found in results.get(name, {}).items():
            if not found["ok"]:
                yield f"- {name}, {what}: {found['reason']}"


def _slow(results: Mapping[str, Found]) -> Iterator[str]:
    for name in entries():
        taken = results.get(name, {}).get("plan", {}).get("wall_s", 0.0)
        if taken > LIMIT_S:
            yield f"{name} ({taken:.0f} s)"
