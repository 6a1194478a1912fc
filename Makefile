# Two commands: `make serve` and `make test`. Both set up everything in .venv first.
COMMA := ,
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
MODEL ?= smollm2-135m-instruct
SERVE_FLAGS ?=
GPU := $(shell nvidia-smi -L 2>/dev/null)
EXTRAS ?= $(if $(GPU),test$(COMMA)cuda,test)

.PHONY: serve test lint slow gpu clean

serve: $(READY)
	$(BIN)/python -m serve --model $(MODEL) $(SERVE_FLAGS)

# The programs of tests run once or twice each: what LLVM would save by optimising them it takes several times over, and so
# does MLIR, of which each small kernel would be compiled with a context of its own. Programs in one part, and the preset, save
# a fifth of the rest.
QUICK := --xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters \
	--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE

# Files in their order: those that xdist would leave for the end, with few tests, are the longest.
test: lint
	JAX_PLATFORMS=cpu XLA_FLAGS="$(QUICK) $(XLA_FLAGS)" $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What takes minutes: long property tests and the real model.
slow: $(READY)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m slow

# On a machine with an NVIDIA GPU: the other tests are of the CPU, whatever there is.
gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 12), "Python 3.12 or newer is needed"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
