# make demo   install into .venv and run the demo
# make test   install into .venv with the test tools and run the tests
# make lint   ruff on the sources, mypy on the installed package
# make native-check  the C++ engine under gcc's sanitizers, through the kernels' tests
# make docs   the pages of docs/ as a site in build/site; dead links and anchors are errors
# make wheel  wheel and sdist into dist/, checked
# make gpu-wheels  what make gpu-check may lack on a machine without a network, into .wheels
# make gpu-check   GPU parity, the demo and speed, into benchmarks/results/gpu

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TREE := build/typecheck

.PHONY: demo test lint ruff mypy native-check docs wheel gpu-check gpu-wheels clean

demo: $(VENV)/.installed
	$(BIN)/asapc demo

# One process a core and one thread each: the tests' tensors are too small to share.
WORKERS ?= -n auto --dist loadfile --no-loadscope-reorder
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) $(PYTEST_ARGS)

lint: ruff mypy

ruff: $(VENV)/.installed-dev
	$(BIN)/ruff check .

CHECK := import asapc.passes, asapc.calibration, asapc.cli; from importlib.resources import files; \
	assert all((files('asapc') / name).is_file() for name in ('demo_data/code/code.npz', \
	'demo_data/code/LICENSE', 'demo_data/code/teacher/model.safetensors', 'demo_data/digits/digits.npz', \
	'recipe.schema.json', 'report/template/report.html.j2'))

# asapc.passes and asapc.calibration exist only in an installed package, so that is what is checked.
# It is also what a user gets from a wheel: every module and the demo data must be in it.
mypy: $(VENV)/.installed-dev
	rm -rf build
	$(PIP) --no-deps --target $(TREE) .
	rm -rf build/lib* build/temp* build/bdist.*
	cd $(TREE) && ../../$(BIN)/python -c "$(CHECK)"
	cd $(TREE) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p asapc

CHECKED := build/engine_checked.so
native-check: $(VENV)/.installed-dev
	mkdir -p build
	g++ -std=c++17 -O1 -g -march=native -Wall -Wextra -Werror -fsanitize=address,undefined \
	    -fno-sanitize-recover=all -shared -fPIC -pthread -o $(CHECKED) asapc/kernels/native/engine.cpp
	LD_PRELOAD=$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libstdc++.so) \
	    ASAN_OPTIONS=detect_leaks=0 ASAPC_NATIVE=$(CHECKED) OMP_NUM_THREADS=2 \
	    $(BIN)/pytest -q -s tests/test_kernels.py tests/test_every_operator.py tests/test_stabilised.py tests/test_plan.py \
	    tests/test_plan_hidden.py tests/test_esp.py tests/test_lot.py tests/test_banded.py tests/test_endings.py \
	    tests/test_features.py tests/test_loop_gradients.py

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[docs]'
	touch $@

# A stale build/lib would end up in the wheel.
wheel: | $(VENV)/bin/python
	rm -rf build/lib* build/temp* build/bdist.* dist
	$(PIP) build twine
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

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

# On a machine with a GPU, torch, triton and pytest; nothing is fetched. At most eight minutes.
GPU_RESULTS ?= benchmarks/results/gpu
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py -o $(GPU_RESULTS)

# What such a machine may lack where it has no network: a few MB in .wheels, beside the checkout's files.
WHEELS ?= pydantic annotated-types typing-inspection typer psutil pyyaml
PLATFORMS := --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
gpu-wheels: | $(VENV)/bin/python
	rm -rf .wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --only-binary=:all: --dest .wheels \
	    --python-version 3.12 --implementation cp $(PLATFORMS) $(WHEELS)
