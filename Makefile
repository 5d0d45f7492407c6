# `make search` runs the main job. `make test` runs the linters and the tests, `make test-fast` the quick ones among them,
# `make test-chaos` those that kill processes, cut off servers and open a browser. `make gpu` runs what needs an NVIDIA
# GPU: its tests, and every benchmark beside its peers. All set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Torch, Ray and MLflow take four times as long to import without compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

# Two processes share the files of tests; each has a Ray cluster and an MLflow server of its own.
WORKERS ?= 2
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Ray, MLflow, Transformers, processes, Triton's interpreter and dense curvature in fp64 take most of the time.
SLOW := benchmarks chaos integrations kernels measure/test_curvature.py search_spaces service test_documents.py test_examples.py test_library.py test_wheel.py

.PHONY: search test test-fast test-chaos gpu lint setup clean

search: setup
	$(BIN)/triaccel search digits --trials 12

test: setup lint
	$(BIN)/pytest $(PARALLEL) --ignore tests/chaos

test-fast: setup
	$(BIN)/pytest $(PARALLEL) $(foreach each,$(SLOW),--ignore tests/$(each))

test-chaos: setup
	$(BIN)/pytest $(PARALLEL) tests/chaos

gpu: setup
	$(BIN)/pytest -m gpu
	$(BIN)/python -m benchmarks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(READY)

# uv installs the same packages as pip, from the same registry, in a fraction of the time.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("triaccel-ray needs Python 3.11 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable . --group dev
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
