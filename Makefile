# `make train` trains the quickstart on this machine; `make test` passes the tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/quickstart.yaml
# tests spread over two processes: each simulates eight devices of its own
SPREAD ?= -n 2 --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# the jax extra that fits this machine's accelerator, if it has one
EXTRA := $(shell if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then echo ',cuda'; elif ls /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1; then echo ',tpu'; fi)

.PHONY: train test test-all test-fast lint soak clean

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxfb needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; use make PYTHON=python3.11")'
	@echo "setting up $(VENV) with jaxfb[plot$(EXTRA)], once; a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[plot$(EXTRA)]"
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(PIP) -e ".[test]"
	@touch $@

train: $(VENV)/installed
	@$(BIN)/jaxfb train $(CONFIG) $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -q $(SPREAD)

# further combinations too, which take longest: an hour and more on two cores
test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -q $(SPREAD) -m ""

test-fast: $(VENV)/installed-test
	$(BIN)/python -m pytest -q $(SPREAD) -m "not slow and not thorough"

lint: $(VENV)/installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .cache runs

# the long versions of the tests of docs/reliability.md; one to two hours on two cores
soak: $(VENV)/installed-test
	$(BIN)/jaxfb chaos --kills 100 --flips 500
