"""Random modules, clusters and shares, planned and compared with one device.

``python -m tests.fuzz --minutes 30 --seed 1`` searches for failures; ``tests/test_fuzz.py``
searches for one minute.
"""
