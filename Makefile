# Each target does its own set-up: `make test` in a fresh clone is enough.

PYTHON_IN_VENV := .venv/bin/python
# Cargo may be installed without being in PATH; PyO3 builds for the Python that runs the tests.
export PATH := $(PATH):$(HOME)/.cargo/bin
export PYO3_PYTHON := $(CURDIR)/.venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test check fuzz bench clean

help:
	@echo "make quickstart  train a tiny policy on Harbor tasks in sandboxes: no GPU, no Docker, no weights to download"
	@echo "make test        all tests; those that need a Docker engine are skipped where there is none (ARGS='-k hub')"
	@echo "make check       linters, types, formatting, Rust tests: what CI runs besides the tests"
	@echo "make fuzz        fuzz the Rust core (SECONDS=60 SUITES='path ...' for real files to start from)"
	@echo "make bench       the benchmarks, as ratios"
	@echo "make clean       remove what the above made"

setup:
	@tools/setup.sh

quickstart: setup
	$(PYTHON_IN_VENV) examples/quickstart/run.py $(ARGS)

test: setup
	$(PYTHON_IN_VENV) -m pytest $(ARGS)

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy python/harbor_trl
	.venv/bin/python -m mypy.stubtest harbor_trl._native --mypy-config-file pyproject.toml --allowlist tools/stubtest-allowed.txt
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo test --locked --quiet

fuzz: setup
	$(PYTHON_IN_VENV) tools/fuzz.py $(or $(SECONDS),60) $(SUITES)

bench: setup
	@set -e; for bench in benches/bench_*.py; do echo "== $$bench"; $(PYTHON_IN_VENV) "$$bench" $(ARGS); done

clean:
	rm -rf .venv .tools target fuzz/target fuzz/corpus fuzz/artifacts dist quickstart-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find python tests -name __pycache__ -prune -exec rm -rf {} +
	rm -f python/harbor_trl/_native.*.so
