"""One command that shows what runs on a GPU; see :mod:`benchmarks.gpu_proof.__main__`."""
