# Everything runs in .venv, made on first use. On machines without an NVIDIA GPU the CPU build of torch is pinned.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
DEMO ?= runs/demo
export PYTHONWARNINGS ?= ignore
export TOKENIZERS_PARALLELISM ?= false
ifeq ($(GPUS),0)
export DS_ACCELERATOR ?= cpu
export OMP_NUM_THREADS ?= 1
CONSTRAINTS := -c constraints.txt
endif

.PHONY: demo test lint docs install clean full

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is required, this is " + sys.version.split()[0])'
	@echo "making $(VENV): pip downloads and installs the packages, which may take some minutes ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: install
	$(BIN)/python examples/demo.py --output $(DEMO)

# Two at a time, those that start no groups of processes.
ALONE := tests/golden tests/parity tests/unit $(addprefix tests/e2e/test_,packaging.py quiet.py readme.py)
GROUPS := tests/distributed tests/e2e $(addprefix --ignore=,$(filter tests/e2e/%,$(ALONE)))

test: install
	$(BIN)/python -m pytest -q -n 2 $(ALONE)
	$(BIN)/python -m pytest -q $(GROUPS)

full: install
	$(BIN)/python -m pytest -q -n 2 -m "full or not full" $(ALONE)
	$(BIN)/python -m pytest -q -m "full or not full" $(GROUPS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy losses ulysses/parallel ulysses/gradients models

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) runs build *.egg-info
