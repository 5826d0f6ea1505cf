"""``python -m hap.cli``: the command ``hap``."""

from hap.cli.commands import console

console()
