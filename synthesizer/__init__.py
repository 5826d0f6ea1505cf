"""Planning: rules, cost, search, shares, schedule and bounds, and the modules that combine them.

Imports ``hap.ir``, ``hap.cluster`` and ``hap.errors``. Pure: no torch, clock, randomness or disk.
"""
