# The list of commands. `make demo` and `make test` need Python >= 3.10 and a network, nothing else.

PYTHON ?= python3
ARGS ?=
VENV := .venv
PEERS ?= .peers
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: help demo test check format coverage train wheel peers clean

help:
	@echo 'make demo      quantize the bundled model for every backend, in a virtual environment of its own'
	@echo 'make test      run the tests; ARGS="-m '"'not slow'"'" leaves out the slow ones'
	@echo 'make check     formatting, lint, types, import floors and size budget'
	@echo 'make format    format and mend what ruff can mend'
	@echo 'make coverage  run the tests and list the lines they miss'
	@echo 'make train     train and export the bundled model again (installs torch)'
	@echo 'make wheel     build the wheel and the source distribution into dist/'
	@echo 'make peers     an environment for each peer that benchmarks/lowbit.py runs beside ours, in .peers/'
	@echo 'make clean     remove the virtual environment and everything that was built'

demo: $(VENV)/.run
	$(BIN)/sbonnx demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not slow" tests/test_floors.py tests/test_tiny.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

coverage: $(VENV)/.dev
	$(BIN)/coverage run -m pytest -q -m 'not slow' $(ARGS)
	$(BIN)/coverage report

train: $(VENV)/.examples
	$(BIN)/python examples/digits/train.py $(ARGS)

wheel: $(VENV)/.dev
	$(BIN)/python -m build

peers:
	$(PYTHON) -m benchmarks.lowbit_peers.environments --folder $(PEERS) $(ARGS)

clean:
	rm -rf $(VENV) .peers build dist sbonnx-demo sbonnx.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Stamps: a package set is installed again only when what it is made from changed.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo '$(PYTHON) is not a Python >= 3.10: say make PYTHON=/path/to/python3 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -e '.[cpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -e '.[cpu,qat,cluster,dev]'
	@touch $(VENV)/.run $@

$(VENV)/.examples: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -e '.[cpu,examples]'
	@touch $(VENV)/.run $@
