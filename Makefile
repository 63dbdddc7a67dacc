# Everything runs in .venv. The install is editable: Python edits need no reinstall, native edits recompile the library.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
NATIVE := $(wildcard native/*.c native/*.h native/*.inc)

.DEFAULT_GOAL := help
.PHONY: help test thorough demo docs check lint types format clean
.DELETE_ON_ERROR:

help:
	@echo "make test | thorough | demo | docs | check (what CI runs) | format | clean"

test: .venv/.installed
	@echo "== tests"
	@$(BIN)/python -m pytest

thorough: .venv/.installed
	@echo "== tests, every combination"
	@$(BIN)/python -m pytest --thorough

demo: .venv/.package
	@$(BIN)/thinwire demo

docs: .venv/.docs
	@echo "== the documentation's site, in site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

check: lint types test

lint: .venv/.dev
	@echo "== ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet

types: .venv/.dev
	@echo "== mypy"
	@$(BIN)/mypy

format: .venv/.dev
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format

clean:
	@rm -rf .venv build dist site src/*.egg-info src/thinwire/kernels/_native.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "== creating .venv"
	@$(PYTHON) -m venv .venv

# The directory itself is a prerequisite of the library: its time changes when a source comes or goes.
.venv/.package: pyproject.toml setup.py constraints.txt native $(NATIVE) | $(BIN)/python
	@echo "== installing thinwire, compiling native/ (the first time takes minutes: torch)"
	@$(PIP) install -c constraints.txt -e '.[bench,report]'
	@test -f src/thinwire/kernels/_native.so || echo "== no native library: no C compiler worked, or THINWIRE_NO_NATIVE=1"
	@touch $@

# thinwire is installed already, so these add only what their extras name and compile nothing.
.venv/.installed: .venv/.package
	@echo "== installing the test dependencies"
	@$(PIP) install -c constraints.txt 'thinwire[test]'
	@$(PIP) install -c constraints.txt 'thinwire[frameworks]' || echo "== no frameworks: their tests skip themselves"
	@touch $@

.venv/.docs: .venv/.package mkdocs.yml
	@echo "== installing what builds the site"
	@$(PIP) install -c constraints.txt 'thinwire[docs]'
	@touch $@

.venv/.dev: .venv/.installed
	@echo "== installing the development tools"
	@$(PIP) install -c constraints.txt 'thinwire[dev]'
	@touch $@
