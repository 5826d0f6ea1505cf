"""Settings of all tests: one thread per process; without a GPU, GPU tests skip with a reason."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; spawned ranks inherit it
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # One cache per run: a killed process can leave a truncated library in a shared cache.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hap-tests-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
if "XDG_CACHE_HOME" not in os.environ:  # rows that are discovered, see hap.rule_cache
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="hap-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

if "HAP_TESTS_GRAPHS" not in os.environ:  # workers share captured graphs, see tests.random_plans
    os.environ["HAP_TESTS_GRAPHS"] = tempfile.mkdtemp(prefix="hap-tests-graphs-")
    atexit.register(shutil.rmtree, os.environ["HAP_TESTS_GRAPHS"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch  # imported late: the pure tests run without torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out torch's modules: scanning them took a tenth of the suite."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
