# The list of commands. `make demo` and `make test` need Python >= 3.10 and a network, nothing else.

PYTHON ?= python3
ARGS ?=
VENV := .venv
PEERS ?= .peers
RUNTIMES := .runtimes
BIN := $(VENV)/bin
PYTEST := pytest -q -n auto --maxprocesses 4 --dist worksteal
FAST := -m "not slow"
LANE_test := $(FAST)
LANE_test-rest := -m slow
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Without stored bytecode, every process that a test starts compiles the package, and every run rewrites all assertions.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test test-rest test-all check format coverage docs train wheel sdist sbom peers clean
.PHONY: golden test-avx2 test-runtimes test-oldest test-interpreted test-wheel fuzz

help:
	@echo 'make demo      quantize the bundled model for every backend, in a virtual environment of its own'
	@echo 'make test      the fast lane: every subject, a sample of its cases; ARGS="tests/graph" runs a part'
	@echo 'make test-rest the other lane: slow tests, and the cases that the fast lane leaves out'
	@echo 'make test-all  both lanes in one run'
	@echo 'make check     formatting, lint, types, import floors and size budget'
	@echo 'make format    format and mend what ruff can mend'
	@echo 'make coverage  run all tests, list the lines they miss; fails below the threshold'
	@echo 'make docs      build the documentation site into build/site; a warning is an error'
	@echo 'make train     train and export the bundled model again (installs torch)'
	@echo 'make wheel     build the wheel and the source distribution into dist/'
	@echo 'make sdist     build the source distribution into dist/, with the same bytes on every machine'
	@echo 'make sbom      write the bill of materials (CycloneDX) of an installation with onnxruntime into dist/'
	@echo 'make peers     an environment for each peer that the benchmarks run beside ours, in .peers/'
	@echo 'make golden            compare golden files with those of the commit that recorded them, where tests skip their digests'
	@echo 'make test-avx2         fast tests as on an x86 CPU without AVX-512, VNNI and AMX (Linux; needs objdump and a C compiler)'
	@echo 'make test-runtimes     tests in onnxruntime-web (Node), the HTP emulator and TensorRT-RTX, installed in .runtimes/ (1 GB)'
	@echo 'make test-oldest       fast tests with the oldest supported packages, in .venv-oldest/'
	@echo 'make test-interpreted  fast tests without the compiled loops'
	@echo 'make test-wheel        install the wheel in a new environment, without a compiler, and run the smoke tests there'
	@echo 'make fuzz              10,000 cases of wrong models, data, recipes and job files through the command line'
	@echo 'make clean     remove the virtual environment and everything that was built'

demo: $(VENV)/.run
	$(BIN)/sbonnx demo $(ARGS)

test test-rest test-all: $(VENV)/.dev
	$(BIN)/python -m $(PYTEST) $(LANE_$@) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(FAST) tests/test_floors.py tests/test_tiny.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

coverage: $(VENV)/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(PYTEST) $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# The variables silence announcements of MkDocs and its theme, which are no warnings about our pages.
docs: $(VENV)/.dev
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict -q $(ARGS)

train: $(VENV)/.examples
	$(BIN)/python examples/digits/train.py $(ARGS)

wheel: sdist
	$(BIN)/python -m build --wheel

sdist: $(VENV)/.dev
	$(BIN)/python .ci/sdist.py

sbom:
	rm -rf .venv-sbom
	$(PYTHON) -m venv .venv-sbom
	$(PYTHON) -m venv .venv-sbom/tool
	.venv-sbom/tool/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7'
	.venv-sbom/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[cpu]'
	.venv-sbom/bin/python -m pip uninstall --quiet --yes pip setuptools
	mkdir -p dist
	.venv-sbom/tool/bin/cyclonedx-py environment .venv-sbom/bin/python --pyproject pyproject.toml --mc-type application \
		--output-reproducible --validate -o dist/sbonnx.cdx.json

peers:
	$(PYTHON) -m benchmarks.peers.environments --folder $(PEERS) $(ARGS)

golden: $(VENV)/.dev
	$(BIN)/python -m tests.golden.elsewhere $(ARGS)

test-avx2: $(VENV)/.dev
	$(BIN)/python .ci/mask/run.py \
		$(BIN)/python -m $(PYTEST) $(FAST) $(ARGS)

test-runtimes: $(VENV)/.dev $(RUNTIMES)/.made
	SBONNX_NODE_MODULES=$(CURDIR)/$(RUNTIMES)/node_modules SBONNX_QNN_PYTHON=$(CURDIR)/$(RUNTIMES)/python/bin/python \
		SBONNX_RTX_PYTHON=$(CURDIR)/$(RUNTIMES)/python/bin/python $(BIN)/python -m pytest -q -rs -n 0 -m "" \
		tests/verify/test_portability.py tests/lint/test_web.py tests/integrations/test_browser_folder.py \
		tests/examples/test_recipes.py -k "not test_recipes or browser or phone or tensorrt" $(ARGS)

test-oldest: .venv-oldest/.made
	.venv-oldest/bin/python -m $(PYTEST) $(FAST) $(ARGS)

test-interpreted: $(VENV)/.dev
	SBONNX_COMPILED=0 $(BIN)/python -m $(PYTEST) $(FAST) $(ARGS)

test-wheel: wheel
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	CC=/bin/false .venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--only-binary :all: "$$(ls -t dist/*.whl | head -1)[cpu]" hypothesis jsonschema pytest pytest-timeout
	.venv-wheel/bin/python .ci/smoke.py

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --cases 10000 $(ARGS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-wheel .venv-sbom .peers $(RUNTIMES) build dist sbonnx-demo sbonnx.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Stamps: a package set is installed again only when what it is made from changed.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo '$(PYTHON) is not a Python >= 3.10: say make PYTHON=/path/to/python3 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

.venv-oldest/.made: pyproject.toml constraints-oldest.txt
	rm -rf .venv-oldest
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[cpu,dev]'
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'installing sbonnx and onnxruntime into $(VENV), about a minute'
	$(PIP) -e '.[cpu]'
	@touch $@

# A runtime without a package for this machine is left out: its tests are skipped, with the reason.
$(RUNTIMES)/.made:
	$(PYTHON) -m venv $(RUNTIMES)/python
	-npm install --prefix $(RUNTIMES) --ignore-scripts --no-audit --no-fund onnxruntime-web@1.30.0 @huggingface/transformers
	-$(RUNTIMES)/python/bin/python -m pip install --quiet onnxruntime onnxruntime-qnn
	-$(RUNTIMES)/python/bin/python -m pip install --quiet --no-deps \
		tensorrt-rtx-cu12-bindings tensorrt-rtx-cu12-libs nvidia-cuda-runtime-cu12
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -e '.[cpu,qat,cluster,dev]'
	@touch $(VENV)/.run $@

$(VENV)/.examples: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -e '.[cpu,examples]'
	@touch $(VENV)/.run $@
