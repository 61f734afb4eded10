# Targets for people and CI. Needed: make, Python 3.11 or newer with its headers, a C++ compiler.
#
#   make demo    install what running needs, then generate text with the shipped v4-nano
#   make test    install the development tools too, then run the whole CPU test-suite
#
# Everything is installed into .venv; `make help` lists the targets and variables.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
WORKERS ?= 2
PYTEST_ARGS ?=
PROMPT ?= def read_file(path
# Package index for torch alone, such as https://download.pytorch.org/whl/cpu (the CPU build, a
# tenth of the download); empty takes whatever pip is configured for.
TORCH_INDEX ?=
# The CPU tests and their tolerances are kept against one version; a GPU machine may bring its own.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.11$(comma)<2.15,torch==2.13.0)

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUNTIME := $(VENV)/.v4graph-runtime
DEV := $(VENV)/.v4graph-dev

.PHONY: help setup demo serve test lint format clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make setup      create $(VENV) and install v4graph with its development tools"
	@echo "make demo       generate text with the shipped v4-nano model"
	@echo "make serve      serve v4-nano over HTTP (PORT=$(PORT))"
	@echo "make test       run the CPU test-suite (WORKERS=$(WORKERS), PYTEST_ARGS=...)"
	@echo "make lint       ruff, pyright and the import contracts"
	@echo "make format     let ruff repair what it can"
	@echo "make clean      remove caches and build output"
	@echo "make distclean  the same, and $(VENV)"
	@echo "variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' TORCH_INDEX=$(TORCH_INDEX)"

setup: $(DEV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: v4graph needs Python 3.11 or newer; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 || echo missing). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || { \
	  echo "error: no C++ compiler; step programs are compiled with one (Debian: g++)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
	  sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { \
	  echo "error: no Python.h; compiled step programs need the headers (Debian: python3-dev)" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first, so that TORCH_INDEX is asked for nothing else. What fits already is left as it is.
$(RUNTIME): pyproject.toml | $(BIN)/python
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) install -e .
	@touch $@

$(DEV): $(RUNTIME)
	$(PIP) install -e '.[dev]'
	@touch $@

demo: $(RUNTIME)
	@echo "v4-nano: loading, then compiling its step programs; the first run takes a few minutes"
	@$(BIN)/v4graph generate v4-nano --prompt '$(PROMPT)' --max-tokens 64

serve: $(RUNTIME)
	$(BIN)/v4graph serve v4-nano --port $(PORT)

# One thread a worker: workers would otherwise wait for each other's threads.
test: $(DEV)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadscope $(PYTEST_ARGS); status=$$?; \
	  if [ $$status -eq 5 ]; then echo "error: pytest found no test to run (exit code 5)" >&2; fi; \
	  exit $$status

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
