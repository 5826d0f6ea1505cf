"""``hap report``: a plan as one self-contained page.

:mod:`.page` renders the templates; each of the other modules prepares one section. Modules are
loaded on first use, as ``report.page``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hap.cli.report import figures_json as figures_json
    from hap.cli.report import page as page
    from hap.cli.report import tensorboard_events as tensorboard_events


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
