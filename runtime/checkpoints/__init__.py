"""Checkpoints of training: saved in shards by every rank, loaded under any plan.

May import :mod:`hap.runtime` and :mod:`hap.ir`; :mod:`hap.runtime.elastic`, training and the commands import it.
"""
