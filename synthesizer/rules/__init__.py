"""The rule table: operator -> rows of placements, one module per mathematical reason."""

from hap.synthesizer.rules import (  # noqa: F401  (importing a module registers its rules)
    factories,
    indexing,
    mesh,
    pointwise,
    products,
    reductions,
    views,
)
from hap.synthesizer.rules.base import RULES, Call, Row
from hap.synthesizer.rules.written import rows_of

__all__ = ["RULES", "Call", "Row", "rows_of"]
