# make quickstart             a trained language model in minutes
# make quickstart-translate   a trained translation model, and its BLEU
# make test                   lint, types and all tests
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install quickstart quickstart-translate test lint lock

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Meshloom needs Python 3.11 or newer, found {v[0]}.{v[1]}: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements.lock \
	  || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

quickstart: install
	$(BIN)/python -m scripts.quickstart

quickstart-translate: install
	$(BIN)/python -m scripts.quickstart_translate

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock:  # after a change of the dependencies in pyproject.toml
	$(BIN)/uv pip compile --universal --quiet --no-header --upgrade --extra dev \
	  pyproject.toml --output-file requirements.lock
