"""Verify every differentiable operator that torch lists for its own tests (``OpInfo``).

    python -m benchmarks.every_operator                     all of them
    python -m benchmarks.every_operator --only sort cdist   some, without a record
    python -m benchmarks.coverage --write-docs              docs/models.md, with the results

Each operator is a model: its floating-point inputs are entries of the batch, times a trained number each, and
the loss is the sum of the squares of its results. Two inputs of torch's samples are taken, the first and one by
chance. Random plans on two and three ranks are compared with one device in float64. An operator whose model
does not train by itself on these inputs, such as one that is not finite, is counted apart. It needs the package
``expecttest``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.coverage import by_chance
from benchmarks.coverage_results import OPERATORS, Found
from hap.capture.tracing import capture
from hap.errors import HapError
from hap.rule_sources import with_rules
from tests.random_plans import make_case, verdict

WORLDS = (2, 3)


class Applied(nn.Module):
    """The loss of an operator's results; the arguments are a tree in which ``None`` is a tensor of the batch."""

    def __init__(self, function: Any, tree: Any, leaves: list[Any], tensors: int) -> None:
        super().__init__()
        self._function, self._tree, self._leaves = function, tree, leaves
        self.scale = nn.Parameter(1 + 0.1 * torch.arange(1.0, tensors + 1))

    def forward(self, *tensors: Tensor) -> Tensor:
        scaled = [x * self.scale[k] if x.is_floating_point() else x for k, x in enumerate(tensors)]
        rest = iter(scaled)
        leaves = [next(rest) if leaf is None else leaf for leaf in self._leaves]
        args, named = pytree.tree_unflatten(leaves, self._tree)
        total = torch.zeros(())
        for result in pytree.tree_leaves(self._function(*args, **named)):
            if isinstance(result, Tensor):
                part = torch.view_as_real(result) if result.is_complex() else result
                total = total + (part.square() if part.is_floating_point() else 0.0 * part).sum()
        return total


@cache
def operators() -> dict[str, Any]:
    """Name -> entry of torch's list of operators. (torch 2.13)"""
    # Importing torch's tests forbids setting flags of backends from then on, which verification does.
    torch.backends.disable_global_flags = lambda: None
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{op.name}.{op.variant_test_name}".rstrip("."): op
        for op in op_db if op.supports_autograd and torch.float32 in op.dtypes
    }  # fmt: skip


def models(name: str) -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the operator's model and batch for the first of torch's inputs, and for one by chance."""
    samples = []
    for sample in operators()[name].sample_inputs("cpu", torch.float32, requires_grad=False):
        leaves, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = tuple(x.clone() for x in leaves if isinstance(x, Tensor))
        whole = all(x.layout == torch.strided and x.numel() for x in tensors)
        if whole and any(x.numel() > 1 for x in tensors) and None not in leaves:
            rest = [None if isinstance(x, Tensor) else x for x in leaves]
            samples.append((tree, rest, tensors))
    others = samples[1:]
    for tree, rest, tensors in [
        *samples[:1],
        *random.Random(name).sample(others, min(1, len(others))),
    ]:
        yield Applied(operators()[name].op, tree, rest, len(tensors)), tensors


def verify(name: str) -> Found:
    """Verify one operator; ``alone`` is the reason why it does not train by itself."""
    torch.manual_seed(0)
    errors, rules, nodes = [0.0], set[str](), 0
    for model, batch in models(name):
        try:
            model(*(x.clone() for x in batch)).backward()
        except Exception as error:
            return {"alone": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"}
        gradient = model.scale.grad
        if not isinstance(gradient, Tensor) or not gradient.isfinite().all():
            return {"alone": "no finite gradient"}
        try:
            graph = with_rules(capture(model, batch), {})
            case = make_case(model, batch, None, _optimizer, graph)
            verdicts = [verdict(case, by_chance(case, world)) for world in WORLDS]
        except HapError as error:
            return {"ok": False, "reason": str(error).partition("\n")[0][:200]}
        for seen in verdicts:
            if not seen.ok:
                return {"ok": False, "reason": f"differs: {seen.first_bad}"}
            errors += [row.error for row in seen.rows]
        rules |= graph.rules.keys()
        nodes += 1
    if not nodes:
        return {"alone": "no dense inputs of more than one element"}
    return {"ok": True, "error": max(errors), "rules": sorted(rules), "inputs": nodes}


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-6)  # squares of results may grow fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of operators")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, Found] = {}
    for name in options.only or operators():
        start = time.perf_counter()
        results[name] = found = verify(name)
        if options.only or not found.get("ok") or time.perf_counter() - start > 20:
            print(f"{name:44} {time.perf_counter() - start:5.1f} s  {found}", flush=True)
    kinds = {"ok": "rules", "refused": "reason", "alone": "alone"}
    print({what: sum(key in found for found in results.values()) for what, key in kinds.items()})
    if not options.only:
        OPERATORS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
