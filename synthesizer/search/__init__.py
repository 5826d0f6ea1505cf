"""The search: the space of programs, its cost tables, three engines that solve them, lowering.

Imports ``cost`` and ``rules``.
"""
