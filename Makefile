# Two commands do everything on a fresh machine: `make demo` and `make test`.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
# Each worker takes half of the files in one piece, so that what a file prepares is prepared once.
WORKERS := -n 2 --dist worksteal

.PHONY: demo test test-fast lint types docs bench-quick clean

demo: $(VENV)/.ready ## Plan a real model for four unlike devices and train it beside DDP.
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.ready ## Pass every test.
	$(BIN)/python -m pytest $(WORKERS)

test-fast: $(VENV)/.ready ## Pass the tests that take less than about a second each.
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

docs: $(VENV)/.ready ## Build the docs as a site; a broken link is an error.
	$(BIN)/mkdocs build --strict

bench-quick: $(VENV)/.ready ## Do the benchmarks run at all? Small sizes, no figures to trust.
	$(BIN)/python -m benchmarks.plan_time --quick
	$(BIN)/python -m benchmarks.one_rank --quick

# torch first, by the exact version of constraints.txt: a build of that version that is in .venv already,
# such as one for CPUs or for another CUDA, satisfies it and stays.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]" --constraint constraints.txt
	touch $@

clean:
	rm -rf $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache build *.egg-info
