"""The rule table: operator -> rows of placements, one module per mathematical reason."""

from hap.synthesizer.rules import (  # noqa: F401  (importing a module registers its rules)
    cross_machine,
    factories,
    images,
    indexing,
    pointwise,
    products,
    reductions,
    views,
)
from hap.synthesizer.rules.rule_table import RULES, Call, Row
from hap.synthesizer.rules.textual_rules import rows_of

__all__ = ["RULES", "Call", "Row", "rows_of"]
