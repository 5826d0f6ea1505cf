"""The facts on an optimizer that planning needs."""

from __future__ import annotations

from dataclasses import dataclass

from hap.errors import PlanError
from hap.ir import plan_json


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """The optimizer's class, and the number of tensors of a parameter's size in its state.

    ``whole_parameters``: it reads across parameters, so that every rank keeps them whole. ``fused``: its step
    on GPUs is one kernel (``fused=True`` of torch's optimizers), which holds no copy of a state.
    """

    name: str
    states: int
    whole_parameters: bool = False
    fused: bool = False

    def __str__(self) -> str:
        whole = ", whole parameters on every rank" if self.whole_parameters else ""
        fused = ", fused" if self.fused else ""
        return f"{self.name} ({self.states} states per parameter{fused}{whole})"

    @staticmethod
    def from_json(content: object) -> OptimizerKind:
        """Read the optimizer of a plan file; before format 4 it is a text, as of ``str``.

        Raises:
            PlanError: the text has no number of states.
            ValueError: the content is that of no optimizer.
        """
        if not isinstance(content, str):
            return plan_json.unpacked(OptimizerKind, content, "the optimizer")
        name, _, rest = content.partition(" (")
        states = rest.partition(" ")[0]
        if not states.isdecimal():
            what = f"the plan's optimizer, {content!r}, has no number of states"
            raise PlanError(what, hint="plan anew")
        return OptimizerKind(name=name, states=int(states))
