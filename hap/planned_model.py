"""Is a model the one that was planned? Capture it again by the plan's recipe, and compare."""

from __future__ import annotations

from torch import nn

from hap.capture.fake_batch import fake_batch
from hap.capture.fixed_entries import fix_entries
from hap.capture.tracing import Loss, capture
from hap.errors import PlanError
from hap.ir.batch import Batch, fixed_entries, form_of
from hap.ir.graph import Graph
from hap.ir.half_gradients import with_half_gradients
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm
from hap.runtime.launch import is_first_of_machine


def check_model(plan: Plan, model: nn.Module, loss: Loss | None, comm: Comm) -> None:
    """Raise on all ranks if the first rank of a machine has another model than the planned one."""
    error: Exception | None = None
    if is_first_of_machine():  # captures of several ranks would share its processors
        try:
            check_graph(plan, model, captured_again(plan, model, fake_batch(plan), loss))
        except Exception as found:  # is raised below; no rank may wait for one that has ended
            error = found
    texts = comm.texts("" if error is None else str(error) or repr(error))
    if error:
        raise error
    if any(texts):
        raise PlanError(next(filter(None, texts)))


def captured_again(plan: Plan, model: nn.Module, batch: Batch, loss: Loss | None) -> Graph:
    """Return the graph of a model, captured by the plan's recipe.

    Raises:
        PlanError: the batch has other numbers in an entry that is the same in every batch.
    """
    recipe, planned = plan.recipe, fixed_entries(plan.recipe.batch)
    batch = fix_entries(batch, planned)
    for name, entry in fixed_entries(form_of(batch)).items():
        if entry != planned[name]:
            raise PlanError(
                f"the batch has {name} = {entry}, and the plan is for {planned[name]}",
                hint="`fixed` names entries that are the same in every batch: plan anew",
            )
    graph = capture(model, batch, loss, autocast=recipe.autocast, recompute=recipe.recompute)
    return with_half_gradients(graph, recipe.gradients)


def check_graph(plan: Plan, model: nn.Module, graph: Graph) -> None:
    """Raise ``PlanError`` if the graph of a model is not the graph that was planned."""
    planned = plan.recipe.training
    if graph.digest != plan.graph.digest and model.training is not planned:
        now, then = ("train()", "eval()") if model.training else ("eval()", "train()")
        raise PlanError(
            f"the model is in {now}, and was in {then} when it was planned",
            hint=f"call model.{then} before hap.compile, or plan anew; models of from_pretrained are in eval()",
        )
    plan.check_model(graph)
