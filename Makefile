# Two commands, each enough on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
ENVIRONMENT := .venv
BIN := $(ENVIRONMENT)/bin
STAMP := $(ENVIRONMENT)/.installed
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

environment: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENVIRONMENT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,baselines,explore]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fst demo --out $(OUT)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 15

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "see it: $(BIN)/python -m http.server --directory build/site --bind 127.0.0.1"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(ENVIRONMENT) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
