"""Checkpoints of training: saved in shards by every rank, loaded under any plan.

May import :mod:`hap.runtime` and :mod:`hap.ir`; only :mod:`hap.api` and the commands import it.
"""
