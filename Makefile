# Each target first makes its environment, if that is missing or older than the pins: .venv, or for
# the benchmark one that holds what it compares with, too. NEWEST=1: the newest releases instead.
PYTHON ?= python3
VENV := $(if $(NEWEST),.venv-newest,.venv)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The kernel named python3 is this environment's, whatever the user has installed besides.
export JUPYTER_PATH := $(CURDIR)/$(VENV)/share/jupyter
# A backend set outside would suppress the figures in the notebooks.
unexport MPLBACKEND

# One notebook at a time: torch uses all cores. --nolock and --rerun-incomplete: a killed run
# goes on where it stopped (the Snakefile keeps two runs apart). --force-use-threads: no worker
# process outlives a killed run.
SNAKEMAKE := $(BIN)/python -m snakemake --cores 1 --nolock --rerun-incomplete --force-use-threads
CONFIG = $(if $(MODELS),models="$(MODELS)") $(if $(TEXTS),texts="$(TEXTS)")

.PHONY: help results test soak lab bench publish second clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

results: $(STAMP) ## run the notebooks, print the verdicts; MODELS="a b" TEXTS="c d" replace config.yaml's
	@$(SNAKEMAKE) results $(if $(strip $(CONFIG)),--config $(CONFIG))

test: $(STAMP) ## check the pins and the style, then run every test but those of soak
	$(if $(NEWEST),,$(BIN)/python tests/pins.py)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m pytest $(if $(NEWEST),-m "not soak and not table")

soak: $(STAMP) ## what takes longer than a test may: runs killed, starved, doubled; fuzzing (hours)
	$(BIN)/python -m pip install --quiet -r tests/requirements-soak.txt
	$(BIN)/python -m pytest -m "soak or table"

lab: $(STAMP) ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

bench: .venv-bench/.installed ## time and memory of the spectra beside other ways to them (20 minutes)
	.venv-bench/bin/python tests/bench.py

publish: $(STAMP) ## refresh the README's tables, then execute the committed notebooks in place
	@$(SNAKEMAKE) readme
	$(BIN)/python tests/families.py
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.coalesce_streams=True \
	    notebooks/*.ipynb

second: $(STAMP) ## run a second model, gemma-3-270m (240 MB), and put its verdicts into the README
	@$(SNAKEMAKE) second --config models="smollm2-135m gemma-3-270m" output=build/second build=build/second

clean: ## remove what runs and tools left, but keep downloads and environments
	rm -rf build .snakemake .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -path './.venv*' -prune -o -type d \
	    \( -name __pycache__ -o -name .ipynb_checkpoints -o -name '.part-*' \) -exec rm -rf {} +

distclean: clean ## clean, and remove downloads and environments too
	rm -rf data/cache .venv .venv-bench .venv-newest

.venv/.installed: INSTALL = -r requirements.txt -c constraints.txt
.venv-newest/.installed: INSTALL = --upgrade $(shell $(PYTHON) tests/pins.py --names)
.venv-bench/.installed: INSTALL = -r tests/requirements-bench.txt
.venv-bench/.installed: tests/requirements-bench.txt

%/.installed: requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or \
	    sys.exit(f"Python {v[0]}.{v[1]} is too old: install 3.11 or newer, make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install $(INSTALL)
	$*/bin/python -m pip install --no-build-isolation --no-deps -e .
	@touch $@
