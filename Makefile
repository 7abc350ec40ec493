# Needs python3 and pip; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS = 1

.PHONY: install reproduce bench test docs test-docs lint check readme wheel clean
install: $(VENV)/installed

$(VENV)/installed: settings.ini setup.py pyproject.toml
	@echo "Installing fedlit and its tools into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -e '.[dev]'
	@touch $@

reproduce: install  ## dimensional collapse and its cure, on digits: figures and a table of claims
	$(BIN)/fedlit reproduce --out reproduced

bench: install  ## this CPU: fedlit beside a plain loop, pfl, flwr and fedjax; what is measured already is kept
	$(BIN)/python -m bench

test: install  ## the notebooks, then the laws
	$(BIN)/nbdev_test --n_workers 2 --timing
	$(BIN)/python -m pytest -n 2

$(VENV)/docs-installed: $(VENV)/installed docs/build.py
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -e '.[docs]'
	@touch $@

docs: $(VENV)/docs-installed  ## the site, into _docs: no Quarto, no network, nothing executed
	$(BIN)/python docs/build.py

test-docs: docs  ## every page in a browser without network (needs Chromium)
	$(BIN)/python -m pytest tests/test_docs.py -rs

lint: install
	$(BIN)/ruff check .

check: lint  ## exporting and cleaning leave no difference, no merge marker in a notebook
	bash .ci/check $(BIN)

readme: install  ## README.md from nbs/index.ipynb
	$(BIN)/python docs/readme.py

wheel: install  ## build the wheel and try it in an empty environment, outside the checkout
	bash .ci/wheel $(BIN)

clean:
	rm -rf build dist _docs _proc reproduced *.egg-info
