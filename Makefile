# make train: everything from a fresh clone to a trained model. make test: the same set-up, then the tests.
# Variables: PYTHON (3.11 or newer), TORCH_INDEX (package index for torch alone, see README), NPROC (processes).
PYTHON ?= python3
TORCH_INDEX ?=
NPROC ?= 2
BIN := .venv/bin
STAMP := .venv/installed
CORES := $(shell nproc 2>/dev/null || echo 1)
# several processes on one machine share its cores
export OMP_NUM_THREADS ?= $(shell n=$$(( $(CORES) / $(NPROC) )); [ $$n -gt 0 ] && echo $$n || echo 1)

.PHONY: setup train test faults checks bench clean

setup: $(STAMP)

$(STAMP): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11. Set PYTHON to a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

train: setup
	$(BIN)/python -m data.prepare
	$(BIN)/torchrun --standalone --nproc_per_node=$(NPROC) train.py

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

faults: setup # rehearsals: kills, signals to the launcher; the kill rounds write bench/results/faults.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.kills
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults --deselect tests/faults/test_kills.py

checks: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layout.py

bench: setup
	$(BIN)/python -m bench.run

clean: # runs and data in outputs/ stay
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis
