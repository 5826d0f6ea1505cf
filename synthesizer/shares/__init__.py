"""Integer shares for a given program: the integer program, and shards as they are stored.

Imports ``cost`` and ``rules``.
"""
