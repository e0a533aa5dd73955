# One command each. Every target sets up what it needs: a virtual environment, pinned packages, Java; for the tests also
# redis-server, PostgreSQL, MariaDB and Chromium.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python
TRIALS ?= 20
URL ?=
SOURCE ?=
export PYSPARK_PYTHON := $(CURDIR)/.venv/bin/python
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/.venv/bin/python

.PHONY: help setup demo test quick pythons lint bench chaos s3 docs clean
help:  ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .setup-stamp  ## make .venv, install pinned packages, redis-server, PostgreSQL, MariaDB and Java where they are absent

.setup-stamp: pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh
	@touch $@ .demo-stamp .demo-stamp-postgres

# Only what the demo needs: no servers for tests, no Chromium. `make setup` includes it.
.demo-stamp .demo-stamp-postgres: pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh demo $(SOURCE)
	@touch $@

demo: .demo-stamp$(if $(SOURCE),-postgres)  ## the whole product in under two minutes; URL=redis://... runs it on Redis, SOURCE=postgres on a database
	@$(PY) -m millstream demo $(if $(URL),--url $(URL)) $(if $(SOURCE),--source $(SOURCE))

test: setup  ## everything, with a few trials of each fault
	@bash scripts/spark42.sh
	@$(PY) scripts/spark_classes.py
	@$(PY) -m pytest -q -n 3 --no-loadscope-reorder tests

quick: setup lint  ## while you work: the linters, unit tests, conformance on the embedded broker; under 3 minutes
	@$(PY) -m pytest -q -n 2 tests/unit tests/codebase
	@$(PY) -m pytest -q -n 2 tests/conformance -k embedded

pythons: setup  ## the quick suites and one test with Spark on Python 3.11, 3.12 and 3.13, where they are installed
	@bash scripts/pythons.sh

lint: setup  ## ruff, mypy --strict, import directions
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --config .importlinter
	@twice=$$(find tests -name 'test_*.py' -printf '%f\n' | sort | uniq -d); \
	  [ -z "$$twice" ] || { echo "two test modules are called $$twice: pytest cannot tell them apart"; exit 1; }

bench: setup  ## every benchmark, ours and the peer in the same run
	@$(PY) -m pip install -q -c constraints.txt --group bench
	@$(PY) -m benchmarks

chaos: setup  ## the faults at length; TRIALS=20 by default; prints the ledger
	@TRIALS=$(TRIALS) $(PY) -m pytest -q -s -m "chaos or at_length" -o timeout=3600 tests

s3: setup  ## fetches Hadoop's S3 connector (690 MB) and moto, and tests storage in an emulation of S3
	@bash scripts/s3.sh
	@TRIALS=$(TRIALS) $(PY) -m pytest -q -s -o timeout=3600 tests/spark/storage tests/spark/cdc -k "s3 or S3"

docs: setup  ## the documentation as a site under site/, its links and front page checked
	@$(PY) -m pip install -q -c constraints.txt --group docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q --strict
	@$(PY) -m pytest -q tests/e2e/test_site.py
	@echo "the front page is site/index.html"

clean:  ## remove what set-up and tests made
	rm -rf .venv .venv-* .setup-stamp .demo-stamp* site .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse
