"""The commands of ``hap`` and their output. May import everything; nothing imports it.

Its modules are loaded on first use, as ``cli.plan_screen``, so that ``hap --help`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hap.cli import checkpoint_commands as checkpoint_commands
    from hap.cli import chrome_trace as chrome_trace
    from hap.cli import elastic_run as elastic_run
    from hap.cli import explain_screen as explain_screen
    from hap.cli import local_run as local_run
    from hap.cli import machine_devices as machine_devices
    from hap.cli import pipeline_hint as pipeline_hint
    from hap.cli import plan_screen as plan_screen
    from hap.cli import profile_screen as profile_screen
    from hap.cli import profiling as profiling
    from hap.cli import report as report
    from hap.cli import rules_screen as rules_screen
    from hap.cli import simulation as simulation
    from hap.cli import stoppable as stoppable
    from hap.cli import terminal as terminal
    from hap.cli import testbed_command as testbed_command
    from hap.cli import verdict_screen as verdict_screen
    from hap.cli import versions as versions
    from hap.cli import what_if as what_if
    from hap.cli import what_if_changes as what_if_changes
    from hap.cli import what_if_plot as what_if_plot
    from hap.cli import worker as worker


def __getattr__(name: str) -> Any:
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
