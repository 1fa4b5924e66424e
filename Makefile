# `make` alone lists the targets.  Every target brings .venv up to date first (instant when it is).
PYTHON ?= python3.11
BIN := .venv/bin

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format mypy bench gpu typings dist clean distclean

help: ## list the targets
	@echo "blockscale: 4-bit block-scaled kernels. Targets:"
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

venv: ## make .venv: Python 3.11, the packages of constraints.txt, this checkout (editable)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' is no Python 3.11 that runs; install one with its venv module" \
	    "(Debian: python3.11-venv) or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) .ci/venv.py

demo: venv ## a real model's layers in 4 bits: built, called from torch, reported
	@$(BIN)/python -m blockscale.demo

test: venv ## pytest
	@$(BIN)/python -m pytest

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

gpu: venv ## build for an H200 what bench.gpu measures (needs nvcc, no GPU)
	@mkdir -p dist
	@$(BIN)/python -m bench.gpu --names | \
	  xargs $(BIN)/blockscale build --target sm_90a -o dist/kernels-sm90a.so

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
