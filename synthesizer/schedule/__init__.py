"""When each instruction runs: the list scheduler, the event simulator, memory over time.

Imports ``cost`` and ``rules``.
"""
