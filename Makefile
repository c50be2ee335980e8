# Everything is installed into .venv and run from there; nothing outside this folder changes.
PYTHON ?= $(shell for python in python3.11 python3; do $$python -c '' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: help demo test test-sweep audit ui clean distclean

help: ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(INSTALLED) ## install, then run the whole pipeline of params.yaml, from data to report
	$(BIN)/tap run

test: $(INSTALLED) ## install, then run all checks and tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict tap pipelines scripts
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist loadgroup

test-sweep: $(INSTALLED) ## test a sweep by two workers, one of which is killed: ten minutes
	$(BIN)/pytest -m sweep -s tests/orchestration/test_sweep.py

audit: ## look the versions of constraints.txt up in the Python Packaging Advisory Database: needs the network
	@test -x .venv/audit/bin/pip-audit || { "$(PYTHON)" -m venv .venv/audit && .venv/audit/bin/pip install --quiet pip-audit; }
	.venv/audit/bin/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r constraints.txt

ui: $(INSTALLED) ## serve the pages of MLflow and Prefect until Ctrl-C
	$(BIN)/tap ui

clean: ## remove all results, models, runs and caches; keep .venv, your data and tracked files
	git clean -ffdxq -- data/raw data/vqvae data/prior data/critic data/actor data/bc data/bc-10 data/iql data/cql data/tt data/tt-q data/dt data/mopo data/reflex data/teacher data/metrics data/params data/lineage data/plots \
		data/report data/scores dvc.lock dvc_plots .dvc/cache .dvc/tmp .checkpoints .prefect .tracking .workers 'mlflow.db*' mlartifacts \
		.mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

distclean: clean ## also remove .venv
	rm -rf .venv

$(INSTALLED): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv .venv || { rm -rf .venv; \
		echo "$(PYTHON) cannot make virtual environments: install python3-venv (Debian, Ubuntu), or make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[pipeline,robotics,d4rl,collect,team,offline-rl,export,dev]'
	$(BIN)/python -m scripts.plots_template
	@touch $@
