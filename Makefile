# The front door. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
export UV_LINK_MODE ?= copy
export VIRTUAL_ENV := $(abspath $(VENV))
UV := $(BIN)/uv pip install -q
PROJECTS := pyproject.toml libs/pyproject.toml

##@ Run it
.PHONY: demo
demo: $(VENV)/.runtime ## one real job, end to end, in one process; exits 0 only if it succeeded
	@$(BIN)/aijobs demo

.PHONY: dev
dev: $(VENV)/.runtime ## the embedded engine until Ctrl-C, and how to call it
	@$(BIN)/aijobs dev

.PHONY: up
up: $(VENV)/.runtime ## the three services on a real database and broker until Ctrl-C or `make down`
	@$(BIN)/python -m deploy.local up

.PHONY: down
down: $(VENV)/.runtime ## stop everything that `make up` started
	@$(BIN)/python -m deploy.local down

##@ Check it
.PHONY: test
test: $(VENV)/.dev ## the whole suite on a real MariaDB/MySQL and RabbitMQ
	@$(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: test-full
test-full: $(VENV)/.dev ## the long tests too
	@$(BIN)/python -m pytest -n 2 --dist loadfile --long -m "not alone"
	@$(BIN)/python -m pytest --long -m alone

.PHONY: test-cluster
test-cluster: $(VENV)/.dev ## three RabbitMQ nodes on this machine, whose leader is killed under load
	@$(BIN)/python -m pytest --long tests/acceptance/test_cluster.py

.PHONY: bench
bench: $(VENV)/.dev ## figures of this machine, one JSON line each
	@$(BIN)/python -m pytest -q --no-header --no-summary tests/benchmarks/bench_*.py

.PHONY: check
check: verify format-check lint types contracts buf ## everything that needs no server

.PHONY: verify
verify: $(VENV)/.dev ## generated files are what their sources give
	@$(BIN)/python -m deploy.protos --check
	@$(BIN)/python -m deploy.settings_page --check
	@$(BIN)/python -m deploy.errors_page --check
	@$(BIN)/python -m deploy.completion_schema --check

.PHONY: format-check
format-check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format" >&2; exit 1; }

.PHONY: lint
lint: $(VENV)/.dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/yamllint --strict .

.PHONY: types
types: $(VENV)/.dev
	@$(BIN)/mypy && $(BIN)/mypy examples/subscriber

.PHONY: contracts
contracts: $(VENV)/.dev
	@$(BIN)/lint-imports --no-logo

.PHONY: buf
buf: $(VENV)/.dev
	@cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code && ../$(BIN)/buf breaking --against released.binpb

##@ Change it
.PHONY: setup
setup: $(VENV)/.dev ## everything for development: test tools, linters, buf

.PHONY: format
format: $(VENV)/.dev ## format everything
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --fix --quiet . ; cd protos && ../$(BIN)/buf format --write

.PHONY: protos
protos: $(VENV)/.dev ## generate the stubs
	@$(BIN)/python -m deploy.protos

.PHONY: docs
docs: $(VENV)/.dev ## generate the pages about settings and errors, and the schema of events
	@$(BIN)/python -m deploy.settings_page
	@$(BIN)/python -m deploy.errors_page
	@$(BIN)/python -m deploy.completion_schema

.PHONY: lock
lock: $(VENV)/.uv ## resolve the dependencies anew into the hashed locks
	@$(BIN)/python -m deploy.locks

.PHONY: clean
clean: ## remove the virtual environment and every local state
	@rm -rf $(VENV) .aijobs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST); echo

# Set-up from nothing. Each stamp is redone when what it was made from changes.
$(VENV)/.uv: requirements/uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "aijobs needs Python 3.11 or newer as $(PYTHON); try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && rm -rf $(VENV) && \
		{ apt-get install -qq -y python3-venv >/dev/null || { apt-get update -qq && apt-get install -qq -y python3-venv >/dev/null; }; } && \
		$(PYTHON) -m venv $(VENV); } || { echo "cannot create a virtual environment: install your system's python3-venv package" >&2; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.lock
	@touch $@

$(VENV)/.runtime: $(VENV)/.uv requirements/runtime.lock $(PROJECTS)
	@$(UV) --require-hashes -r requirements/runtime.lock
	@$(UV) --no-deps --no-build-isolation -e libs -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.lock
	@$(UV) --require-hashes -r requirements/dev.lock
	@touch $@
