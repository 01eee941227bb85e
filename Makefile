# make env     the environment in .venv (made once; again when setup.py changes)
# make demo    trains AmoebaNet on digits, in a pipeline on logical devices
# make test    lint, types and tests
# make soak    the tests that take long: more random models, whole grids, benchmarks, memory
# make format  puts the sources into the form that lint expects
# make clean   removes what the others made
#
# PYTHON  the interpreter to make the environment with
# EXTRA   which TensorFlow to install: cpu (wheels for Linux and Windows on x86), gpu or tpu; empty to use one that is
#         installed by hand

PYTHON ?= python3
EXTRA ?= cpu

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)
comma := ,
EXTRAS := $(if $(EXTRA),$(EXTRA)$(comma))examples,dev

# Two processes, each with whole files, so that what a file's tests share is made once; see tests/conftest.py.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := test
.PHONY: env demo test soak lint format clean

env: $(STAMP)

$(STAMP): setup.py
	@echo "Installing tf_gpipe[$(EXTRAS)] into $(VENV): about 2.5 GB, which takes some minutes without a word"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@
	@echo "Done: $(BIN)/python has it"

demo: $(STAMP)
	$(BIN)/python examples/digits_amoebanet.py

test: lint
	$(BIN)/python -m pytest $(TWO) -q

soak: $(STAMP)
	$(BIN)/python -m pytest $(TWO) -q -m soak

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tf_gpipe

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
