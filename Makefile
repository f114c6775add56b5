# the same commands serve a machine without a TPU and a TPU VM: torch_xla takes the TPU when there is one
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
# e.g. PIP_FLAGS="--index-url ..." for a CPU build of torch, which leaves the CUDA libraries out
PIP_FLAGS ?=
# a TPU belongs to one process at a time, so tests run side by side only where there is none
TPU := $(wildcard /dev/accel* /dev/vfio/[0-9]*)
TEST_WORKERS ?= $(if $(TPU),0,2)
DEMO_FLAGS ?=
TEST_FLAGS ?=

.PHONY: demo test test-slow lint doctor docs clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(DEMO_FLAGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(TEST_FLAGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(TEST_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .

doctor: $(STAMP)
	$(BIN)/torch-svg doctor

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	$(BIN)/mkdocs build --strict --site-dir site

# made once; made again only when the requirements change. python compiles what it imports, pip would compile it all
$(STAMP): setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar off --no-compile $(PIP_FLAGS) -e ".[tpu,demo,test]"
	touch $@

clean:
	rm -rf $(VENV) outputs site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
