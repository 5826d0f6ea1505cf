"""``python -m hap``: the command ``hap``, where it is not on the ``PATH``."""

from hap.cli.commands import console

console()
