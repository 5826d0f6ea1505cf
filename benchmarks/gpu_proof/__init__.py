"""One command that checks the package on a GPU; see :mod:`benchmarks.gpu_proof.__main__`."""
