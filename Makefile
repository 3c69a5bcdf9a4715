# The two commands of the README. Both make their own virtual environment; a second run takes seconds.
#   make demo    load a model, complete a few prompts together, print the text and the KV report
#   make test    format, lint, types, all tests

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
MODEL  := models/smollm2-135m-instruct

.PHONY: demo test lint lines clean

demo: $(VENV)/.run $(MODEL)/model.safetensors
	$(BIN)/python examples/01_generate.py $(MODEL)

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lines:
	@$(PYTHON) scripts/lines.py

clean:
	rm -rf $(VENV) models build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(MODEL)/model.safetensors: recipes/smollm2.py | $(VENV)/.run
	$(BIN)/python recipes/smollm2.py --out $(MODEL)
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) --editable '.[recipes]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch
	$(PIP) --editable '.[recipes,dev]'
	@touch $@
