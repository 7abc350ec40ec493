# Needs python3 and pip; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# torch 2.15 otherwise reports every profile, and that there is no GPU
export KINETO_LOG_LEVEL ?= 99
# many tests start Python, and pytest rewrites every file that it has not kept
unexport PYTHONDONTWRITEBYTECODE
# what `make test-machines` pretends to be; .ci/machines.py has the list
MACHINES ?= default sse41 mkl threads

.PHONY: install hooks reproduce bench test test-laws test-slow test-here test-long test-all test-machines test-lowest docs test-docs quarto lint check readme wheel clean
install: $(VENV)/installed

$(VENV)/installed: settings.ini setup.py pyproject.toml
	@echo "Installing fedlit and its tools into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -e '.[dev]'
	@touch $@

hooks: install  ## what git does by itself: .pre-commit-config.yaml at a commit, nbdev's merge of notebooks cell by cell
	$(BIN)/uv pip install -q --python $(BIN)/python pre-commit
	$(BIN)/pre-commit install
	$(BIN)/nbdev_install_hooks

reproduce: install  ## dimensional collapse and its cure, on digits: figures and a table of claims
	$(BIN)/fedlit reproduce --out reproduced

bench: install  ## this CPU: fedlit beside a plain loop, pfl, flwr and fedjax; what is measured already is kept
	$(BIN)/python -m bench

test: install  ## the notebooks, then the laws
	$(BIN)/nbdev_test --n_workers 2
	$(MAKE) test-laws

test-laws: install  ## the laws, and all other tests that are quick
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: install  ## what `make test` leaves out: many cases, many processes, and in a real kernel a page for every way of drawing
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not long"

test-here: install  ## test-slow, and of test-laws what no processor changes; test-machines has the others
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "(same or slow) and not long"

test-long: install  ## once a week: what is tried with every method, the two thirds that `make test` left out; all pages that draw, and whole
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

test-all: test test-slow test-long  ## everything

test-machines: install  ## the notebooks and the quick tests as other processors would run them: make test-machines MACHINES="default threads"
	$(BIN)/python .ci/machines.py $(BIN) $(MACHINES)

# the oldest Python that settings.ini promises; $(PYTHON) if uv neither finds nor fetches it
OLDEST ?= 3.10
LOWEST := $(VENV)-lowest
test-lowest: install  ## the quick tests with the oldest version of everything that settings.ini promises
	$(BIN)/uv venv -q --clear --python $(OLDEST) $(LOWEST) || $(BIN)/uv venv -q --clear --python $(PYTHON) $(LOWEST)
	$(BIN)/uv pip install -q --resolution lowest-direct --python $(LOWEST)/bin/python -e '.[dev]'
	$(LOWEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" $(TESTS)

$(VENV)/docs-installed: $(VENV)/installed docs/build.py
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -e '.[docs]'
	@touch $@

docs: $(VENV)/docs-installed  ## the site, into _docs: no Quarto, no network, nothing executed
	$(BIN)/python docs/build.py

test-docs: docs  ## every page in a browser without network (needs Chromium)
	$(BIN)/python -m pytest tests/test_docs.py -rs

quarto: install  ## all that nbdev_docs does before it calls Quarto, without Quarto
	$(BIN)/python docs/quarto.py

lint: install  ## the code, and what can be seen of pages and promises without running them
	$(BIN)/ruff check .
	$(BIN)/python docs/lint.py

check: lint  ## exporting and cleaning leave no difference, no merge marker in a notebook, no result typed into prose
	bash .ci/check $(BIN)

readme: install  ## README.md from nbs/index.ipynb
	$(BIN)/python docs/readme.py

wheel: install  ## build the source archive and the wheel, and try them in an empty environment, outside the checkout
	bash .ci/wheel $(BIN)

clean:
	rm -rf build dist _docs _proc reproduced *.egg-info
