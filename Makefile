# make quickstart             a trained language model in minutes
# make quickstart-translate   a trained translation model, and its BLEU
# make cuda, make tpu         JAX for the NVIDIA GPUs or the TPUs of this machine
# make test                   lint, types and tests, in 20 minutes
# make test-all               the same with every case of every test, in 35 minutes
# make test-newest            the tests with the newest packages, ignoring the lock file
# make test-sweep             a search for layouts that change a result, until stopped
# make test-faults            tests with many kills, signals, stalls and interrupts, and a fuzzer
# make bench                  speed, compared with other libraries where they are installed
# make bench-gpu              the same on a GPU, in 8 minutes: 1.3B dense, long rows, experts, decoding
# make papers                 docs/papers.md and its pictures, in a few minutes
# make screenshots            screenshots of the HTML pages, for docs/
# make docs                   the documentation as a site with search, in .cache/site/html
# make audit                  known vulnerabilities of the installed packages
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
LOCK := $(BIN)/uv pip compile --universal --quiet --no-header --upgrade --generate-hashes

GPU_PARTS := train_1.3b train_1.3b_8k train_1.3b_experts generate_1.3b
GPU_ROUNDS := --rounds=3 --steps=5 --one_at_a_time
train_1.3b := train --shape=1.3b --systems=meshloom,torch_compiled $(GPU_ROUNDS)
train_1.3b_8k := train --shape=1.3b_8k --systems=meshloom,torch_compiled $(GPU_ROUNDS)
train_1.3b_experts := train --shape=1.3b_experts --systems=meshloom $(GPU_ROUNDS)
generate_1.3b := generate --shape=1.3b --batch_sizes=1,32

export UV_SYSTEM_CERTS := true
# Some container images set it.  Without compiled files, each command takes four seconds longer to start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install cuda tpu quickstart quickstart-translate test test-all test-faults test-newest test-sweep lint bench bench-gpu test-gpu \
  papers screenshots docs audit lock

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Meshloom needs Python 3.11 or newer, found {v[0]}.{v[1]}: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	sed -n '/^uv==/,/[^\]$$/p' requirements.lock > .venv/uv.lock
	$(PIP) --no-deps --require-hashes -r .venv/uv.lock \
	  && $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements.lock \
	  || $(PIP) --no-deps --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

cuda tpu: install
	$(BIN)/uv pip install --python $(BIN)/python --constraint requirements.lock --editable ".[$@]"

quickstart: install
	$(BIN)/python -m scripts.quickstart

quickstart-translate: install
	$(BIN)/python -m scripts.quickstart translate

test: install lint
	$(BIN)/python -m pytest

test-all: install lint
	$(BIN)/python -m pytest --all-cases

test-sweep: install  # make test-sweep SWEEP="--seed=4711 --cases=1 --run_every=1"
	$(BIN)/python -m tests.sweep $(SWEEP)

test-newest: install  # make test-newest TESTS="-n 0 tests/test_private_apis.py"
	.ci/test-newest $(TESTS)

test-faults: install
	$(BIN)/python -m pytest -n 0 -m faults
	$(BIN)/python -m tests.scripts.fuzz --cases=10000

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck scripts/launch/*.sh .ci/*

bench: install
	@for name in train translate decode moe generate; do \
	  echo "$$name:"; $(BIN)/meshloom bench $$name --json=bench/$$name.json || exit 1; done

bench-gpu: cuda  # compares with PyTorch where it is installed: .venv/bin/pip install torch
	@$(BIN)/python -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu" and "no GPU: JAX computes on a CPU")'
	$(MAKE) --keep-going test-gpu $(addprefix bench_gpu/,$(GPU_PARTS))

test-gpu:
	XLA_FLAGS=--xla_gpu_autotune_level=0 MESHLOOM_TEST_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -n 0 tests/test_accelerator.py

# JAX's default share of GPU memory, 0.75, is too small for 1.3B weights and their batch.
bench_gpu/%:
	@mkdir -p $(@D)
	XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 $(BIN)/meshloom bench $($*) --json=$@.json

papers: install
	$(BIN)/python -m docs.site.papers

screenshots: install  # needs Chromium, and playwright: .venv/bin/pip install playwright
	$(BIN)/python -m docs.site.screenshots

docs: install  # fails on broken links and anchors
	$(BIN)/uv venv --quiet --allow-existing .venv/docs
	$(BIN)/uv pip install --quiet --python .venv/docs --no-deps --require-hashes -r docs.lock
	$(BIN)/python -m docs.site.stage
	cd .cache/site && ../../.venv/docs/bin/zensical build --strict --clean
	@echo "The search needs a server: python3 -m http.server --bind 127.0.0.1 --directory .cache/site/html"

audit: install  # checks the locked packages for known vulnerabilities
	$(BIN)/uv venv --quiet --allow-existing .venv/audit
	$(BIN)/uv pip install --quiet --python .venv/audit --no-deps --require-hashes -r audit.lock
	.venv/audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements.lock -r audit.lock

lock:  # after the dependencies in pyproject.toml change
	$(LOCK) --extra dev pyproject.toml --output-file requirements.lock
	$(LOCK) --group audit --output-file audit.lock
	$(LOCK) --group docs --output-file docs.lock
