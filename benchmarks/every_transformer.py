"""Verify the models of the installed ``transformers`` for each of 15 tasks, made small.

    python -m benchmarks.every_transformer                     all of them, two at a time
    python -m benchmarks.every_transformer --only Qwen3Config  one, without a record
    python -m benchmarks.every_transformer --kinds words       those of a task
    python -m benchmarks.coverage --write-docs                 docs/models.md, with the results

The zoo's sizes are chosen by hand; here they follow from the names of a configuration's fields, so that an
architecture that is new in ``transformers`` is tried without a change. Layers left out by chance and spectra
masked by numpy are off, since they are refused (docs/models.md). One random plan on three ranks is
compared with one device in float64. A model that does not train by itself at these sizes says nothing
about ``hap`` and is counted apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.coverage_results import EVERY, Found, read_every
from benchmarks.small_configurations import small

TABLES = {
    "causal": "CAUSAL_LM", "masked": "MASKED_LM", "pairs": "SEQ_TO_SEQ_CAUSAL_LM", "images": "IMAGE_CLASSIFICATION",
    "pixels": "SEMANTIC_SEGMENTATION", "patches": "MASKED_IMAGE_MODELING", "videos": "VIDEO_CLASSIFICATION",
    "sounds": "AUDIO_CLASSIFICATION", "ctc": "CTC", "speech": "SPEECH_SEQ_2_SEQ",
    "sentences": "SEQUENCE_CLASSIFICATION", "words": "TOKEN_CLASSIFICATION", "answers": "QUESTION_ANSWERING",
    "captions": "ZERO_SHOT_IMAGE_CLASSIFICATION", "described": "IMAGE_TEXT_TO_TEXT",
}  # fmt: skip
"""Kind of model -> the table of transformers that lists them."""

LIMIT_S = 400.0

LARGEST = 30_000_000
"""Parameters up to which a model counts as small."""


def verify(kind: str, name: str) -> Found:
    """Verify one architecture; ``alone`` is the reason why it does not train by itself."""
    import torch

    import hap
    from benchmarks.coverage import by_chance, case_of, unlike
    from benchmarks.transformer_batches import BATCHES
    from benchmarks.zoo.entry import Entry
    from hap.errors import HapError
    from hap.synthesizer.search.bucket_elimination import TooWide
    from tests.random_plans import verdict

    def built() -> Any:
        torch.manual_seed(0)
        model_class = model_of(kind, name)
        config = small(model_class.config_class)
        if kind == "speech" or getattr(config, "is_encoder_decoder", False):
            config.decoder_start_token_id = 2
        if kind in ("sentences", "words", "answers", "captions"):
            for part in (config, config.get_text_config()):
                part.pad_token_id = getattr(part, "pad_token_id", None) or 0
                part.eos_token_id = 2
        return model_class(config).train()

    def with_batch() -> Any:
        return built(), batch

    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in built().parameters())
        if count > LARGEST:
            return {"alone": f"{count} parameters at the sizes of this table"}
        batches = list(BATCHES[kind](built().config))
    except Exception as error:
        return {"alone": f"{type(error).__name__}: {_first_line(error)}"}
    reason = ""
    for batch in batches:
        try:
            loss = built()(**batch).loss
            loss.backward()
            if loss.isfinite():
                break
            reason = reason or "the loss is not finite"
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {_first_line(error)}"
    else:
        return {"alone": reason}
    start = time.perf_counter()
    fixed = tuple(key for key in batch if key.endswith("_grid_thw"))
    entry = Entry(name=name, family="", brings="", tiny=with_batch, full=with_batch, fixed=fixed)
    try:
        case = case_of(entry)
        try:
            plan = by_chance(case, 3)
        except TooWide:  # random plans come from the exact search; the planner has others
            plan = hap.plan(case.model, case.batch, unlike(3, random.Random(name)))
        seen = verdict(case, plan)
    except HapError as error:
        return {"ok": False, "reason": _first_line(error)}
    if not seen.ok:
        return {"ok": False, "reason": f"differs: {seen.first_bad}"}
    return {
        "ok": True, "nodes": len(case.graph.nodes), "error": max(row.error for row in seen.rows),
        "rules": sorted(case.graph.rules), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].replace(str(Path(sys.prefix)) + "/", "")[:200]


def _tell(pipe: Connection, kind: str, name: str) -> None:
    import torch

    torch.set_num_threads(1)  # a fork lacks its parent's threads
    pipe.send(verify(kind, name))


def _found(todo: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, Found]]:
    """Yield the result of each, two forks at a time: a fork has what this process imported."""
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(todo)), dict[Connection, tuple[str, str, Any, float]]()
    while waiting or running:
        while waiting and len(running) < 2:
            kind, name = waiting.pop()
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_tell, args=(theirs, kind, name))
            process.start()
            theirs.close()
            running[ours] = kind, name, process, time.monotonic() + LIMIT_S
        ready = wait(list(running), timeout=1.0)
        for pipe, (kind, name, process, deadline) in list(running.items()):
            if pipe not in ready and time.monotonic() < deadline:
                continue
            found: Found = {"ok": False, "reason": f"not done after {LIMIT_S:.0f} s"}
            if pipe in ready:
                try:
                    found = pipe.recv()
                except EOFError:
                    found = {"ok": False, "reason": "the process ended without a result"}
            process.kill()
            process.join()
            del running[pipe]
            yield kind, name, found


def _listed(kind: str) -> dict[str, Any]:
    """Return the configurations of a kind, with the name of their class or classes of models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    modeling = import_module("transformers.models.auto.modeling_auto")
    table = getattr(modeling, f"MODEL_FOR_{TABLES[kind]}_MAPPING_NAMES")
    listed: dict[str, Any] = {}
    for name, given in table.items():
        listed.setdefault(CONFIG_MAPPING_NAMES[name], given)
    return listed


def names(kind: str) -> list[str]:
    """Return the classes of configurations of a kind."""
    return [*_listed(kind)]


def model_of(kind: str, name: str) -> Any:
    """Return the class of a kind's models that a configuration is for."""
    import transformers

    given = _listed(kind)[name]
    return getattr(transformers, given if isinstance(given, str) else given[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="classes of configurations")
    parser.add_argument("--kinds", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--again", action="store_true", help="run what has a result already")
    options = parser.parse_args()
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    for slow in ("benchmarks.coverage", "hap.api", "tests.random_plans"):
        import_module(slow)  # before the forks
    import transformers

    todo = [
        (kind, name) for kind in options.kinds for name in names(kind)
        if (name in options.only if options.only
            else options.again or name not in read_every().get(kind, {}))
    ]  # fmt: skip
    for kind, name, found in _found(todo):
        print(f"{kind:7} {name:28} {found}", flush=True)
        if not options.only:
            results = read_every()
            results.setdefault(kind, {})[name] = found
            results["transformers"] = {"listed": {k: len(names(k)) for k in TABLES}}
            results["transformers"]["version"] = {"number": transformers.__version__}
            EVERY.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
