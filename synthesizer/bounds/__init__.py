"""Lower bounds of the step time, and the branching that tightens them.

Imports ``search``, ``cost`` and ``rules``.
"""
