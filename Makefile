# make demo: environment, installation, the examples, their pictures.
# make test: environment, installation, all checks and tests.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: demo test lint benchmarks clean

demo: $(STAMP)
	$(BIN)/python examples/karate.py --output output/karate.png
	$(BIN)/python examples/node_classification.py --output output/digits.png
	$(BIN)/python examples/ising.py --output output/ising.png
	$(BIN)/python examples/link_prediction.py --output output/links.png

test: $(STAMP) lint
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered --cov-fail-under=95

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy pyro_nmm models guides

benchmarks: $(STAMP)
	$(BIN)/python benchmarks/gradient_variance.py
	$(BIN)/python benchmarks/speed.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fast,examples,test]'
	touch $@

clean:
	rm -rf $(VENV) build dist output *.egg-info
