# Each target installs its tools first; a second run is quick. `make` alone lists the targets.

ARGS ?=
WORKERS ?= 2
# Any Python, 3.11 or newer; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
CODE := aioshard tests hatch_build.py $(wildcard benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-compiled test-older-broker test-slow check format bench chaos coverage docs hooks broker chromium connector postgresql prometheus schema-registry screenshots clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## run the demo: real flights through one process; needs no Java
	@$(BIN)/aioshard demo $(ARGS)

test: $(VENV)/.dev broker connector postgresql chromium prometheus schema-registry ## run all tests except the long ones; ARGS="-k order" selects some
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-fast: $(VENV)/.dev ## run the quick tests that need no server, with few random seeds
	@AIOSHARD_TEST_SEEDS=2 $(BIN)/python -m pytest -n $(WORKERS) -m "not chaos and not slow" \
		tests/unit tests/engine tests/simulation $(ARGS)

check: $(VENV)/.dev ## lint, format, types, import contracts and the documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(CODE)
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/zensical build --strict --clean

format: $(VENV)/.dev ## format the code and apply safe lint fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.dev broker ## run the benchmarks on a real broker; ARGS="p1 --json" selects one and prints JSON
	@$(BIN)/python -m benchmarks $(ARGS)

chaos: $(VENV)/.dev broker connector postgresql chromium ## run the long tests: kill brokers and processes for minutes, run simulations and state machines with 2,000 seeds
	@$(BIN)/python -m pytest -m chaos $(ARGS)
	@[ -n "$(ARGS)" ] || AIOSHARD_TEST_SEEDS=2000 $(BIN)/python -m pytest -n $(WORKERS) --timeout=900 \
		tests/simulation tests/unit/properties

test-compiled: $(VENV)/.dev ## build the compiled package and run the fast tests on it; ARGS=tests/guarantees selects others
	@$(BIN)/python -m tests.tools.compiled -n $(WORKERS) $(ARGS)

test-older-broker: $(VENV)/.dev broker ## run the tests of clients and consumer groups on the older Kafka; ARGS=tests/cluster selects others
	@version=$$($(BIN)/python -c 'from tests.support.kafka_libs import OLDER; print(OLDER)') && \
		AIOSHARD_KAFKA_VERSION=$$version $(BIN)/python -m pytest -n $(WORKERS) \
		$(or $(ARGS),tests/kafka/wire tests/kafka/client tests/kafka/conformance tests/kafka/cli/test_group.py)

test-slow: chaos ## the same as chaos

coverage: $(VENV)/.dev broker connector postgresql chromium prometheus schema-registry ## run the tests and show lines and branches that no test runs
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n $(WORKERS) $(ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

docs: $(VENV)/.dev ## build the documentation into site/
	@$(BIN)/zensical build --strict --clean

hooks: $(VENV)/.dev ## install git hooks that check changed files before each commit: ruff, mypy and prose
	@$(BIN)/python -m pip install --quiet pre-commit
	@$(BIN)/pre-commit install

broker: $(VENV)/.dev ## download the jars of both brokers, the newest and the older Kafka; without Java or Maven, tests that need a broker are skipped
	@$(BIN)/python -m tests.tools.provision broker

connector: $(VENV)/.dev ## download Spark's own Kafka connector; without Maven, tests that compare with it are skipped
	@$(BIN)/python -m tests.tools.provision connector

chromium: $(VENV)/.dev ## install Debian's Chromium if it is missing; without it, tests that need it are skipped
	@$(BIN)/python -m tests.tools.provision chromium

screenshots: $(VENV)/.dev chromium ## take the pictures of dashboard, documentation and terminal in docs/images
	@$(BIN)/python -m tests.tools.screenshots
	@$(BIN)/python -m tests.tools.pictures

postgresql: $(VENV)/.dev ## install PostgreSQL if it is missing; without it, tests that need it are skipped
	@$(BIN)/python -m tests.tools.provision postgresql

prometheus: $(VENV)/.dev ## install Debian's Prometheus if it is missing; without it, tests that need it are skipped
	@$(BIN)/python -m tests.tools.provision prometheus

schema-registry: $(VENV)/.dev ## download a schema registry; without Java or Maven, tests that need it are skipped
	@$(BIN)/python -m tests.tools.provision schema-registry

clean: ## remove everything that the targets create: environment, jars, caches, site
	rm -rf $(VENV) build dist site .cache .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache htmlcov

$(VENV)/.pip:
	@test -n "$(PYTHON)" || { echo "found no Python 3.11 or newer on PATH: install one, or run make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.pip
	@$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.pip
	@$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	@touch $@
