# Everstep. `make` alone lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where torch comes from besides the package index. PyPI's needs gigabytes of CUDA; a machine without a GPU can do with
# make demo TORCH_INDEX=... and the address of PyTorch's index of CPU builds, which its installation page gives.
TORCH_INDEX ?=
# Processes that share the tests, a file at a time. Much of a test is waiting, so four keep two cores busy. 0: one alone.
WORKERS ?= 4
# Images of containers like to set it; then each process compiles everything anew, and tests start hundreds of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt hatch_build.py everstep/native/copy_hash.c
	$(PYTHON) -c 'import sys; sys.exit("Everstep needs Python 3.11 or later, this is " + sys.version.split()[0] + "; say make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

FRAMEWORKS := $(VENV)/.frameworks
$(FRAMEWORKS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,frameworks]'
	touch $(FRAMEWORKS)

.PHONY: setup
setup: $(STAMP) ## make .venv with everything pinned by constraints.txt

.PHONY: demo
demo: $(STAMP) ## a real training run through seven faults, on this machine (FAST=1, LAYOUT=fsdp2)
	$(BIN)/python -m examples.demo $(if $(FAST),--fast) $(if $(LAYOUT),--layout $(LAYOUT))

PYTEST := $(BIN)/python -m pytest
SHARED = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: test
test: $(STAMP) ## all tests but the nightly ones, several files at a time (WORKERS=0: one after another)
	$(PYTEST) -m "not nightly and not frameworks" --ignore tests/integration/documents $(SHARED)

.PHONY: test-documents
test-documents: $(STAMP) ## the demo, and each script, command and printed output of README, tutorial and how-to pages
	$(PYTEST) -m "not nightly and not frameworks" $(SHARED) tests/integration/documents

.PHONY: test-fast
test-fast: WORKERS = 2  # these tests seldom wait, and each worker collects all of them
test-fast: $(STAMP) ## the tests that start no training run and take no seconds, in about a minute
	$(PYTEST) -m "not slow and not nightly and not frameworks" $(SHARED) tests/unit tests/contract tests/model tests/scenarios tests/sim

.PHONY: test-frameworks
test-frameworks: WORKERS = 2  # each of these tests trains on two to four ranks
test-frameworks: $(FRAMEWORKS) ## kills under Lightning, transformers, DeepSpeed, torchtitan, Megatron, JAX and Ray; installs gigabytes
	$(PYTEST) -m "frameworks and not nightly" $(SHARED)

# Not from $(STAMP): each version has a virtual environment of its own, without torch, in out/pythons.
.PHONY: test-pythons
test-pythons: ## the fast tests that need no torch, under other Pythons (PYTHONS="3.12 3.13", REQUIRE=1: none missing)
	$(PYTHON) tools/other_pythons.py --numprocesses $(WORKERS) $(if $(REQUIRE),--require) $(or $(PYTHONS),3.12 3.13)

.PHONY: test-for
test-for: $(STAMP) ## the files' own tests, then those at most two imports away (FILES="a.py b.py", DISTANCE=1: one)
	tests=$$($(BIN)/python tools/tests_for.py $(if $(DISTANCE),--distance $(DISTANCE)) $(FILES)) && $(PYTEST) -m "not nightly" $$tests

.PHONY: test-nightly
test-nightly: $(FRAMEWORKS) ## the longest tests: torture, all pairs of layouts, 2,000 simulated worlds (SEEDS, FIRST)
	$(PYTEST) -m nightly
	EVERSTEP_EXAMPLES=20 $(PYTEST) -m "not slow and not nightly and not frameworks" --timeout 3600 $(SHARED) tests/unit tests/model
	$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0)

.PHONY: lint
lint: $(STAMP) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases bench tests
	$(BIN)/lint-imports

.PHONY: docs
docs: $(STAMP) ## build the documentation site into out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: docs-serve
docs-serve: $(STAMP) ## show the documentation site at http://127.0.0.1:8000 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

.PHONY: bench
bench: $(STAMP) ## every bench in its quick size
	$(BIN)/python -m bench.recovery --quick --no-peers
	$(BIN)/python -m bench.hook_cost --quick
	$(BIN)/python -m bench.fleet_load --quick
	$(BIN)/python -m bench.fleet_load --quick --database postgresql --failover
	$(BIN)/python -m bench.hostile --quick
	$(BIN)/python -m bench.goodput --quick
	$(BIN)/python -m bench.checkpoint --quick --no-peers
	$(BIN)/python -m bench.sdc --digests --quick
	$(BIN)/python -m bench.exactness --quick --sizes 2,25
	$(BIN)/python -m bench.sdc --quick
	$(BIN)/python -m bench.calm --quick
	$(BIN)/python -m bench.sensors --quick
	$(BIN)/python -m bench.sensors --noise --quick
	$(BIN)/python -m bench.sensors --latency --quick
	$(BIN)/python -m bench.sensors --cost --quick

.PHONY: gpu-bundle
gpu-bundle: ## pack the wheels that make gpu needs where there is no package index
	$(PYTHON) -m bench.gpu_bundle pack

# Not from $(STAMP): a machine with GPUs has torch already, and need not reach a package index.
.PHONY: gpu
gpu: ## prove and measure everything on this machine's GPUs, in ten minutes (JSON=out/gpu.json)
	$(PYTHON) -m bench.gpu_bundle install $(VENV)-gpu
	mkdir -p out
	$(VENV)-gpu/bin/python -m bench.gpu --json $(or $(JSON),out/gpu.json)

.PHONY: sim
sim: $(STAMP) ## worlds from seeds, with checkers (SEEDS=2000, FIRST=0)
	$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0)

.PHONY: sim-mutants
sim-mutants: $(STAMP) ## deliberate mistakes in those worlds: each must be seen
	$(BIN)/python -m tests.sim.mutants

.PHONY: sim-month
sim-month: $(STAMP) ## 30 days of 1,250 nodes
	$(BIN)/python -m tests.sim.fleet_month

.PHONY: secrets
secrets: ## write the compose fleet's secrets to deploy/secrets (without torch: needs no `make setup`)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/everstep-controller || $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	CONTROLLER_COMMAND=$(abspath $(BIN))/everstep-controller deploy/make-secrets.sh

.PHONY: schema
schema: $(STAMP) ## write the wire messages' JSON Schemas to everstep/wire/schema
	$(BIN)/python -m everstep.wire.export

.PHONY: clean
clean: ## remove what make made
	rm -rf $(VENV) $(VENV)-gpu gpu-bundle out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
