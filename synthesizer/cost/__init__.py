"""The cost model: seconds and bytes of operators, collectives, and whole programs run serially.

Imports ``rules``. Decides nothing.
"""
