# `make train` trains the quickstart on this machine; `make test` passes the tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/quickstart.yaml

# the jax extra that fits this machine's accelerator, if it has one
EXTRA := $(shell if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then echo ,cuda; elif ls /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1; then echo ,tpu; fi)

.PHONY: train test test-fast lint clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[test$(EXTRA)]"
	touch $@

train: $(VENV)/installed
	$(BIN)/jaxfb train $(CONFIG) $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest -q

test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -q -m "not slow"

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .cache runs
