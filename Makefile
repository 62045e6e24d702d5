# On a fresh machine start with `make demo` or `make test`: each sets up everything it needs. For the newest versions instead
# of those that CI tests: `make VENV=.venv-newest CONSTRAINTS=/dev/null test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS)
DEMO_DIR := runs/demo
WORKERS ?= 3
SEEDS ?= 0-299
JOBS ?= 2
MINUTES ?= 10
OLDEST := .venv-oldest
TRL := $(VENV)/trl
RELEASE := .venv-release
HASHED ?=
LISTED := .ci/requirements.txt .ci/requirements-trl.txt .ci/requirements-oldest.txt .ci/requirements-release.txt
RUN_ALL := $(BIN)/python tests/support/run_all.py --workers $(WORKERS)

.PHONY: help demo test test-fast test-oldest test-gpu lint docs pictures chaos oracle coverage fuzz format bench release-check lock audit clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: $(VENV)/.examples  ## Train on real data in four processes, one of them slow, offline; show the runs and write a report
	@rm -rf $(DEMO_DIR)
	WANDB_MODE=offline $(BIN)/python examples/lightning/slow_rank.py --log-dir $(DEMO_DIR)
	$(BIN)/dist-wandb show $(DEMO_DIR)
	$(BIN)/dist-wandb report $(DEMO_DIR) --output $(DEMO_DIR)/report.html

test: $(VENV)/.development $(TRL)/.ready  ## Run all tests, with WORKERS=3 whole jobs at a time
	@$(RUN_ALL) test

test-fast: $(VENV)/.development  ## Run a quick check between edits: lint, fast unit tests, one job of each integration
	@$(RUN_ALL) test-fast

test-oldest: $(OLDEST)/.ready  ## Run the core, contract, Accelerate and Trainer tests with the oldest supported versions
	@$(RUN_ALL) test-oldest

test-gpu: $(VENV)/.development  ## Run all that only a CUDA device can show, on one of this machine, in under ten minutes
	$(BIN)/python -m pytest --cuda tests/gpu

docs: $(VENV)/.development  ## Build the documentation into build/site; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENV)/.development  ## Redraw the pictures of run modes and reports in docs/images; needs Chromium
	$(BIN)/python scripts/diagrams.py
	$(BIN)/python scripts/screenshots.py

lint: $(VENV)/.development  ## Check style, imports, sizes and types, and that the documentation builds
	@$(RUN_ALL) lint

chaos: $(VENV)/.development  ## Run random jobs with faults (SEEDS=0-299, JOBS=2) and check their runs
	SEEDS=$(SEEDS) $(BIN)/python -m pytest -rP -n $(JOBS) tests/chaos/test_seeds.py

oracle: $(VENV)/.development  ## Compare random scripts (SEEDS=0-299, JOBS=2) by stock wandb and by this package
	SEEDS=$(SEEDS) $(BIN)/python -m pytest -n $(JOBS) --timeout 0 tests/e2e/test_stock_oracle.py

coverage: $(VENV)/.development  ## Measure the line and branch coverage of unit and distributed tests; under 95 % is an error
	@$(INSTALL) 'coverage>=7.10'
	@rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -q -n $(WORKERS) --dist loadfile tests/unit tests/distributed
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

fuzz: $(VENV)/.development  ## Fuzz the parsers of untrusted input for MINUTES=10 (TARGETS="blob table" selects some)
	MINUTES=$(MINUTES) TARGETS="$(TARGETS)" $(BIN)/python -m pytest --timeout 0 tests/fuzz

format: $(VENV)/.development  ## Format the code and apply automatic fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.development  ## Run the benchmarks (BENCH=--quick to try them); results in benchmarks/results
	$(BIN)/python -m benchmarks.run_all $(BENCH)

release-check: $(RELEASE)/.ready  ## Build, install and test the release; sdist, wheel and SBOM are in dist afterwards
	$(RELEASE)/bin/python scripts/release_check.py $(if $(HASHED),--hashed)

lock: $(VENV)/.development  ## Regenerate the hashed requirements of CI (.ci/requirements*.txt)
	@$(INSTALL) 'uv>=0.9,<1'
	$(BIN)/python .ci/requirements.py lock $(BIN)/uv

audit: $(VENV)/.development  ## Look up known vulnerabilities of the packages of CI; queries PyPI over the internet
	@$(INSTALL) 'pip-audit>=2.7,<3'
	@for listed in $(LISTED); do $(BIN)/pip-audit --strict --disable-pip --require-hashes --requirement "$$listed" || \
		{ echo "audit: failed: a vulnerability is listed above, or the query failed (see the error)."; exit 1; }; done

clean:  ## Remove the environments and all generated files
	rm -rf $(VENV) $(OLDEST) $(RELEASE) .venv-newest runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/results

# HASHED=1, as in CI: install what .ci/requirements.txt pins by version and hash, if it is valid for this Python and platform.
# Otherwise print a note and install by the constraints. The list covers all dependency groups. $(VENV)/.hashed records that
# it was installed, because `make demo` without HASHED may have set up the environment before. Dependency groups need pip 25.1.
$(VENV)/.examples: pyproject.toml constraints.txt $(if $(HASHED),$(LISTED))
	@echo "Setting up $(VENV) (a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ -n "$(HASHED)" ] && $(BIN)/python .ci/requirements.py suits; then \
		$(BIN)/python .ci/requirements.py install newest $(BIN)/python && touch $(VENV)/.hashed; \
	else \
		rm -f $(VENV)/.hashed; \
		$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1,<27' && $(INSTALL) --editable '.[all]' --group examples; \
	fi
	@touch $@

$(VENV)/.development: $(VENV)/.examples
	@test -e $(VENV)/.hashed || $(INSTALL) --group test --group lint --group docs
	@touch $@

# An environment whose Python also finds what .venv has, after its own packages.
define beside_newest
	@echo "Setting up $(1) ..."
	@test -x $(1)/bin/python || $(BIN)/python -m venv --without-pip $(1)
	@$(BIN)/python -c "import sysconfig as s; print(s.get_path('purelib'))" > \
		"$$($(1)/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/newest.pth"
endef

# trl and what it needs, for the test that has it on its path. What .venv has, above all torch, is not installed again.
$(TRL)/.ready: $(VENV)/.development
	$(call beside_newest,$(TRL))
	@if [ -n "$(HASHED)" ] && test -e $(VENV)/.hashed; then \
		$(BIN)/python .ci/requirements.py install trl $(TRL)/bin/python; \
	else \
		$(BIN)/python -m pip --python $(TRL)/bin/python install --quiet --constraint $(CONSTRAINTS) --group trl; \
	fi
	@touch $@

# Packages of .venv, above all torch, are not installed again: the older versions come before them on the path.
$(OLDEST)/.ready: $(VENV)/.development pyproject.toml constraints-oldest.txt
	$(call beside_newest,$(OLDEST))
	@if [ -n "$(HASHED)" ] && test -e $(VENV)/.hashed; then \
		$(BIN)/python .ci/requirements.py install oldest $(OLDEST)/bin/python; \
	else \
		$(BIN)/python -m pip --python $(OLDEST)/bin/python install --quiet --no-warn-conflicts \
			--constraint constraints-oldest.txt --editable '.[all]' --group test setuptools; \
	fi
	@touch $@

$(RELEASE)/.ready: pyproject.toml
	@echo "Setting up $(RELEASE) ..."
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@if [ -n "$(HASHED)" ]; then \
		$(RELEASE)/bin/python .ci/requirements.py install release $(RELEASE)/bin/python; \
	else \
		$(RELEASE)/bin/python -m pip install --quiet --upgrade 'pip>=25.1,<27' && \
		$(RELEASE)/bin/python -m pip install --quiet --group release; \
	fi
	@touch $@
