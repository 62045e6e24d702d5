# Two targets do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
DEMO_DIR := runs/demo
WORKERS ?= 2
OLDEST := .venv-oldest
NOT_OLDEST := -m "not newest" -k "not milliseconds"

.PHONY: help demo test test-oldest lint format bench clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

demo: $(VENV)/.examples  ## Train on real data in two processes, offline, and show what was logged
	@rm -rf $(DEMO_DIR)
	WANDB_MODE=offline $(BIN)/python examples/lightning/train_digits.py --strategy ddp --devices 2 --log-dir $(DEMO_DIR)
	$(BIN)/dist-wandb show $(DEMO_DIR)

test: $(VENV)/.development  ## Run all tests; those of whole jobs WORKERS at a time, those with short limits alone
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/distributed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not alone" tests/contract tests/e2e
	$(BIN)/python -m pytest -m alone tests/e2e

test-oldest: $(OLDEST)/.ready  ## Run the tests of the core, the contract and Accelerate with the oldest supported versions
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(NOT_OLDEST) tests/unit tests/distributed
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(NOT_OLDEST) tests/contract tests/e2e/test_accelerate.py

lint: $(VENV)/.development  ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.development  ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.development  ## Run the benchmarks (BENCH=--quick to try them); JSON in benchmarks/results
	$(BIN)/python -m benchmarks.run_all $(BENCH)

clean:  ## Remove the environment and everything that was made
	rm -rf $(VENV) $(OLDEST) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/results

# pip learnt dependency groups in 25.1.
$(VENV)/.examples: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(INSTALL) --editable '.[all]' --group examples
	@touch $@

$(VENV)/.development: $(VENV)/.examples
	@$(INSTALL) --group test --group lint
	@touch $@

# What .venv has, torch above all, is not installed again: what is older comes before it on the path.
$(OLDEST)/.ready: $(VENV)/.development pyproject.toml constraints-oldest.txt
	@echo "Setting up $(OLDEST) ..."
	@test -x $(OLDEST)/bin/python || $(BIN)/python -m venv --without-pip $(OLDEST)
	@$(BIN)/python -c "import sysconfig as s; print(s.get_path('purelib'))" > \
		"$$($(OLDEST)/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/newest.pth"
	@$(BIN)/python -m pip --python $(OLDEST)/bin/python install --quiet --no-warn-conflicts \
		--constraint constraints-oldest.txt --editable '.[all]' --group test setuptools
	@touch $@
