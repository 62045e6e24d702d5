# Two targets do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
DEMO_DIR := runs/demo
WORKERS ?= 3
SEEDS ?= 0-299
JOBS ?= 2
MINUTES ?= 10
OLDEST := .venv-oldest
RELEASE := .venv-release
HASHED ?=
LISTED := .ci/requirements.txt .ci/requirements-oldest.txt
RUN_ALL := $(BIN)/python tests/support/run_all.py --workers $(WORKERS)

.PHONY: help demo test test-fast test-oldest lint docs pictures chaos coverage fuzz format bench release-check lock audit clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

demo: $(VENV)/.examples  ## Train on real data in four processes, one of them slow, offline; show and report what was logged
	@rm -rf $(DEMO_DIR)
	WANDB_MODE=offline $(BIN)/python examples/lightning/slow_rank.py --log-dir $(DEMO_DIR)
	$(BIN)/dist-wandb show $(DEMO_DIR)
	$(BIN)/dist-wandb report $(DEMO_DIR) --output $(DEMO_DIR)/report.html

test: $(VENV)/.development  ## Run all tests; those of whole jobs WORKERS at a time, those with short limits last
	@$(RUN_ALL) test

test-fast: $(VENV)/.development  ## Check between two edits: lint, unit tests that are not slow, one job of each integration
	@$(RUN_ALL) test-fast

test-oldest: $(OLDEST)/.ready  ## Run the tests of the core, the contract and Accelerate with the oldest supported versions
	@$(RUN_ALL) test-oldest

docs: $(VENV)/.development  ## Build the site into build/site; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENV)/.development  ## Draw the pictures of run modes and reports in docs/images anew; needs Chromium
	$(BIN)/python scripts/diagrams.py
	$(BIN)/python scripts/screenshots.py

lint: $(VENV)/.development  ## Check style and types, and that the site builds
	@$(RUN_ALL) lint

chaos: $(VENV)/.development  ## Play random jobs with faults (SEEDS=0-299, JOBS=2), check what they leave
	$(BIN)/python tests/chaos --seeds $(SEEDS) --jobs $(JOBS)

coverage: $(VENV)/.development  ## Count which lines and branches the tests of the core reach; under 95 % is an error
	@$(INSTALL) 'coverage>=7.10'
	@rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -q -n $(WORKERS) --dist loadfile tests/unit tests/distributed
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

fuzz: $(VENV)/.development  ## Read random bytes for MINUTES=10, with each parser of what comes from elsewhere (TARGETS="blob table")
	$(BIN)/python tests/fuzz/run_fuzz.py --minutes $(MINUTES) $(TARGETS)

format: $(VENV)/.development  ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.development  ## Run the benchmarks (BENCH=--quick to try them); JSON in benchmarks/results
	$(BIN)/python -m benchmarks.run_all $(BENCH)

release-check: $(RELEASE)/.ready  ## Build, install and test what would be released; sdist, wheel and SBOM are left in dist
	$(RELEASE)/bin/python scripts/release_check.py

lock: $(VENV)/.development  ## Write anew what CI installs, with hashes (.ci/requirements*.txt)
	$(BIN)/python .ci/requirements.py lock $(BIN)/python

audit: $(VENV)/.development  ## Look for known vulnerabilities of what CI installs; asks PyPI's service on the internet
	@$(INSTALL) 'pip-audit>=2.7,<3'
	@for listed in $(LISTED); do $(BIN)/pip-audit --strict --disable-pip --require-hashes --requirement "$$listed" || \
		{ echo "audit: failed: a vulnerability is listed above, or the service could not be asked (the error says)."; exit 1; }; done

clean:  ## Remove the environment and everything that was made
	rm -rf $(VENV) $(OLDEST) $(RELEASE) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/results

# HASHED=1, as in CI: what .ci/requirements.txt pins by version and hash, where that list holds; elsewhere it says so, and
# what is installed is chosen by the constraints. That list has all groups; $(VENV)/.hashed says that it was installed, as
# `make demo` without HASHED may have set up the environment before. pip learnt dependency groups in 25.1.
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

# What .venv has, torch above all, is not installed again: what is older comes before it on the path.
$(OLDEST)/.ready: $(VENV)/.development pyproject.toml constraints-oldest.txt
	@echo "Setting up $(OLDEST) ..."
	@test -x $(OLDEST)/bin/python || $(BIN)/python -m venv --without-pip $(OLDEST)
	@$(BIN)/python -c "import sysconfig as s; print(s.get_path('purelib'))" > \
		"$$($(OLDEST)/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/newest.pth"
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
	@$(RELEASE)/bin/python -m pip install --quiet --upgrade 'pip>=25.1,<27'
	@$(RELEASE)/bin/python -m pip install --quiet --group release
	@touch $@
