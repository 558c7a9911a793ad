# The two commands: `make demo` and `make test`. Both make .venv first (once). `make` alone lists all targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo demo-tiny hacking-figure test unit integration e2e lint docs lock clean

# .pyc files matter: importing vLLM takes three times as long without them, in each of several processes
export PYTHONDONTWRITEBYTECODE =
export PYTHON FLAVOUR

BIN := .venv/bin
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -q $(PYTEST_ARGS)

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/make \1\t\2/' | expand -t 18

install: ## make .venv with the pinned packages (seconds once it is there)
	@bash requirements/install.sh

demo: install ## SmolLM2-135M learns one-digit arithmetic by GRPO; results in runs/demo
	@$(BIN)/vime model get smollm2-135m --out models/smollm2-135m
	@$(BIN)/python examples/arithmetic/make_data.py
	@$(BIN)/vime train examples/arithmetic/run.toml --overwrite

demo-tiny: install ## the short check: a character-level model learns to reverse words; results in runs/demo-tiny
	@$(BIN)/vime model tiny --out models/tiny
	@$(BIN)/python examples/reverse/make_data.py
	@$(BIN)/vime train examples/reverse/run.toml --overwrite

hacking-figure: install ## reward hacking, and its cure, in real training runs; writes docs/img/hacking.png
	@PYTHONPATH=. $(BIN)/python examples/hacking/figure.py

test: install ## unit, integration and end-to-end tests, two files at a time; files on one worker share one server
	@$(PYTEST) -n $(JOBS) --dist loadfile tests/unit tests/integration tests/e2e

unit integration e2e: install ## one stage of the tests
	@$(PYTEST) tests/$@

lint: install ## ruff, mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: install ## write docs/config.md anew
	@$(BIN)/vime config > docs/config.md

# Maintainers: resolve both locks anew. `+cpu` wheels: from pytorch.org, or a local folder (make lock TORCH_CPU="--find-links DIR").
TORCH_CPU ?= --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
COMPILE := $(BIN)/uv pip compile -q --no-header --no-annotate --python-platform x86_64-manylinux_2_28 \
           --extra agents --extra dataplane --extra demo --extra dev --extra docs --extra forksync --extra lora --extra observe --extra trackers pyproject.toml
lock: ## resolve requirements/cpu.txt and cuda.txt anew (maintainers)
	@rm -f requirements/cpu.txt requirements/cuda.txt  # an old output would hold back newer versions
	@$(COMPILE) requirements/cpu.in --extra cpu --python-version 3.11 $(TORCH_CPU) --overrides requirements/overrides.txt -o requirements/cpu.txt >/dev/null
	@$(COMPILE) requirements/cuda.in --extra cuda --python-version 3.12 -o requirements/cuda.txt >/dev/null
	@wc -l requirements/*.txt

clean: ## remove runs and caches (models/ and .venv stay)
	@rm -rf runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
