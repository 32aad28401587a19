# Two commands, each enough on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
ENVIRONMENT := .venv
BIN := $(ENVIRONMENT)/bin
# The package with what `make demo` needs, and on top of it the tools of `make test`.
STAMP := $(ENVIRONMENT)/.installed
TOOLS := $(ENVIRONMENT)/.tools-installed
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
OUT ?= runs/demo

.PHONY: demo test check docs format environment clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    environment, then: generate data, train, evaluate, draw (OUT=$(OUT))"
	@echo "make test    environment, then: linters, type checker, tests"
	@echo "make check   the linters and the type checker alone"
	@echo "make docs    environment, then: run the tutorials, build the site: build/site"
	@echo "make format  rewrite the sources in the house format"
	@echo "make clean   remove the environment and caches"

environment: $(TOOLS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENVIRONMENT)
	$(INSTALL) -e '.[explore]'
	touch $(STAMP)

$(TOOLS): $(STAMP)
	$(INSTALL) -e '.[dev,baselines,explore]'
	touch $(TOOLS)

demo: $(STAMP)
	$(BIN)/fst demo --out $(OUT)

check: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 15

docs: $(TOOLS)
	$(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "see it: $(BIN)/python -m http.server --directory build/site --bind 127.0.0.1"

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(ENVIRONMENT) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
