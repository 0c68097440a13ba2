# make demo: environment, installation, a Pyro program, seven examples and their pictures.
# make test: environment, installation, lint, types, and all tests but the long ones.
# make test-slow: the long tests of the library, and those that run documents, examples and the wheel.
# make test-benchmarks: small runs of the benchmarks, their rivals, and the tables of stored results.
# make portable: quick tests of numerics in the instructions that all processors have.
# make docs: the documentation site, docs/_build/html/index.html, which needs no network; tutorials run
# when their text changes.
# make coverage: the quick tests again, with every line traced: before Python 3.12 that takes most of
# their time.
# make floor: the quick tests with the lowest versions that pyproject.toml allows, in an environment of
# its own (several GB, for the oldest torch comes with CUDA).
# make newest: the quick tests with the newest versions, in an environment of its own (several GB): what
# pip install -e . brings without the constraints.
# make extras: pip resolves each extra of pyproject.toml with the constraints, and installs nothing.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
EXTRAS ?= arviz,examples,maps,test
CONSTRAINTS = constraints.txt
# Without a file, pip takes the newest versions.
PIP_CONSTRAINTS = $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
FLOOR ?= build/floor
NEWEST ?= build/newest
LIST_EXTRAS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])
# One process a core, each on one thread; processes that the tests start too.
WORKERS ?= -n logical --dist worksteal
test-slow test-benchmarks quick portable coverage: export OMP_NUM_THREADS = 1
# What depends on the last digits, and is quick: half of it takes a minute on two cores.
NUMERICS = tests/distributions tests/models/test_consensus.py \
	tests/core/test_diagnostics.py tests/core/test_doctests.py tests/core/test_edge_products.py

# The longest first.
DEMO = few_labels fonts node_classification annotators ising karate borrowed_label

.PHONY: always demo test test-slow test-benchmarks docs quick portable coverage floor newest extras lint benchmarks clean

# Two programs at once, each on one thread, after the first; what they print is kept beside their pictures.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python examples/pyro_program.py
	OMP_NUM_THREADS=1 $(MAKE) --jobs 2 $(DEMO:%=output/%.png)

output/%.png: examples/%.py $(STAMP) always
	@mkdir -p output
	@$(BIN)/python $< --output $@ > output/$*.txt
	@echo "== $<" && cat output/$*.txt

test: lint quick

test-slow: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m slow --ignore tests/benchmarks

test-benchmarks: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) tests/benchmarks

docs: $(VENV)/.documented
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	$(BIN)/python -m pytest -q tests/docs/test_offline.py tests/docs/test_reference.py

coverage: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" --ignore tests/benchmarks --cov --cov-report=term:skip-covered \
		--cov-fail-under=95

quick: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" --ignore tests/benchmarks

# PyTorch, MKL and Numba choose instructions by these; compiled loops are kept for one choice.
portable: export MKL_CBWR = COMPATIBLE
portable: export ATEN_CPU_CAPABILITY = default
portable: export NUMBA_CPU_NAME = generic
portable: export NUMBA_CACHE_DIR = $(CURDIR)/build/numba
portable: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" $(NUMERICS)

floor:  # arviz-stats and libpysal need later versions of others
	$(MAKE) quick VENV=$(FLOOR) CONSTRAINTS=floor.txt EXTRAS=examples,test

newest: export PIP_UPGRADE = 1
newest: export PIP_UPGRADE_STRATEGY = eager
newest:
	rm -f $(NEWEST)/.installed  # there may be newer versions since
	$(MAKE) quick VENV=$(NEWEST) CONSTRAINTS=

extras: $(STAMP)
	for extra in $$($(BIN)/python -c '$(LIST_EXTRAS)'); do \
		echo "extra $$extra"; \
		$(BIN)/python -m pip install --quiet --dry-run $(PIP_CONSTRAINTS) ".[$$extra]" || exit 1; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types && cp -r pyro_nmm build/types
	cp -r models guides build/types/pyro_nmm  # as the wheel has them
	cd build/types && $(abspath $(BIN))/mypy --cache-dir $(CURDIR)/.mypy_cache \
		--config-file $(CURDIR)/pyproject.toml -p pyro_nmm

benchmarks: $(STAMP)
	$(BIN)/python -m benchmarks.scale.run variance --shares 0.05 0.2 0.6 1 --repeats 200
	$(BIN)/python -m benchmarks.scale.run draw step --samples 1 8 --repeats 11

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip $(PIP_CONSTRAINTS)
	$(BIN)/python -m pip install --quiet $(PIP_CONSTRAINTS) --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/.documented: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_CONSTRAINTS) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist output docs/_build docs/api *.egg-info
