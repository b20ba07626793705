# make demo | test | test-quick | test-only | lint | kernels | test-slow | test-full | test-gpu | test-stand-in | bench |
# docs: each sets up .venv first. make test-twin | twin-table | twin-trials: each sets up .venv-twin.
#
# PYTHON          interpreter that the virtual environment is made with (3.10 or later; 3.11 is what the pins are for)
# CONSTRAINTS     versions that are installed: constraints/oldest.txt with Python 3.10, constraints/newest.txt with 3.13
# TORCH_PIP_ARGS  extra arguments for installing torch, for instance --index-url of a CPU-only build
# WORKERS         processes that run the tests; "auto" is one for each core, 0 is none beside pytest itself

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TORCH_PIP_ARGS ?=
WORKERS ?= auto
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FEW := $(VENV)/.installed-for-demo
# Files in their own order: in the order of how many tests they have, those with few long ones would come last.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30
SOURCES := memplan integrations tests benchmarks examples

.PHONY: demo test test-quick test-only lint kernels test-slow test-full test-gpu test-stand-in bench docs format clean \
	test-twin twin-table twin-trials test-kernels

demo: $(FEW)
	$(BIN)/python -m memplan demo

test: $(STAMP)
	$(MAKE) --jobs=2 lint kernels
	$(PYTEST)

# Something of every layer, in a few minutes: for everyday work.
QUICK := tests/test_imports.py tests/test_names.py tests/plans tests/solvers/test_solvers.py tests/capture/test_capture.py \
	tests/planning/test_module_islands.py tests/runtime/test_outputs.py tests/runtime/test_bindings.py \
	tests/installed/test_life_with_a_plan.py tests/ranks/test_shards.py tests/whole/test_zoo.py

test-quick: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(PYTEST) $(QUICK)

# Without the linters, which are for the pinned versions.
test-only: kernels
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

kernels: $(STAMP)
	$(BIN)/python -m memplan warmup

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu and not twin and not kernels"

test-full: $(STAMP)
	MEMPLAN_ALL_EXAMPLES=1 $(PYTEST) -m "not gpu and not twin and not kernels"

# On a machine with a CUDA device, with a build of torch for it.
test-gpu: $(STAMP)
	PYTORCH_ALLOC_CONF=expandable_segments:True CUBLAS_WORKSPACE_CONFIG=:4096:8 \
		$(BIN)/python -m pytest -m gpu -rs --tb=short

# The same on a stand-in for such a device, which is compiled first (tests/cuda_stand_in).
test-stand-in: $(STAMP)
	$(BIN)/python -m tests.cuda_stand_in -m pytest -p tests.cuda_stand_in.faults -m gpu tests \
		tests/cuda_stand_in/slab.py

# Kernels that libraries take on GPUs, run by Triton's interpreter. Triton takes 1 GB.
KERNELS := .venv-kernels
KERNELS_STAMP := $(KERNELS)/.installed

test-kernels: $(STAMP) $(KERNELS_STAMP)
	TRITON_INTERPRET=1 PYTHONPATH=$(KERNELS) $(BIN)/python -m pytest -m kernels tests/kernels

# PyTorch's own CUDA build on a device that does nothing: tests/cuda_twin. Its environment takes 6 GB.
TWIN := .venv-twin
TWIN_STAMP := $(TWIN)/.installed

test-twin: $(TWIN_STAMP)
	$(TWIN)/bin/python -m pytest -m twin tests/cuda_twin tests/problem/test_caching_allocator.py

twin-table: $(TWIN_STAMP)
	$(TWIN)/bin/python -m tests.cuda_twin.table

twin-trials: $(TWIN_STAMP)
	$(TWIN)/bin/python -m tests.cuda_twin.trials

bench: $(STAMP)
	$(BIN)/python -m benchmarks.activation_memory_budget

# The pages of docs/ as a site, in site/.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find memplan -name "*.nb[ic]" -delete

# torch comes first and alone, so that nothing else decides which build of it is installed.
$(FEW): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_PIP_ARGS) -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[hf]'
	touch $(FEW)

$(STAMP): $(FEW)
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[test]'
	touch $(STAMP)

$(KERNELS_STAMP): tests/kernels/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(KERNELS) -r tests/kernels/requirements.txt
	touch $(KERNELS_STAMP)

$(TWIN_STAMP): tests/cuda_twin/requirements.txt tests/cuda_twin/build.py $(wildcard tests/cuda_twin/src/*)
	test -x $(TWIN)/bin/python || $(PYTHON) -m venv $(TWIN)
	$(TWIN)/bin/python -m pip install --quiet -r tests/cuda_twin/requirements.txt
	$(TWIN)/bin/python -m pip install --quiet --no-deps -e .
	$(TWIN)/bin/python tests/cuda_twin/build.py
	touch $(TWIN_STAMP)
