# make demo   install into .venv and run the demo
# make test   install into .venv with the test tools and run the tests
# make lint   ruff on the sources, mypy on the installed package

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TREE := build/typecheck

.PHONY: demo test lint ruff mypy clean

demo: $(VENV)/.installed
	$(BIN)/asapc demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest $(PYTEST_ARGS)

lint: ruff mypy

ruff: $(VENV)/.installed-dev
	$(BIN)/ruff check .

CHECK := import asapc.passes, asapc.calibration, asapc.cli; from importlib.resources import files; \
	assert (files('asapc') / 'demo_data' / 'digits' / 'digits.npz').is_file()

# asapc.passes and asapc.calibration exist only in an installed package, so that is what is checked.
# It is also what a user gets from a wheel: every module and the demo data must be in it.
mypy: $(VENV)/.installed-dev
	rm -rf build
	$(PIP) --no-deps --target $(TREE) .
	rm -rf build/lib build/bdist.*
	cd $(TREE) && ../../$(BIN)/python -c "$(CHECK)"
	cd $(TREE) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p asapc

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
