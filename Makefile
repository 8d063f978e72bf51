# Every target sets itself up: the virtual environment .venv is made on first use
# (tools/bootstrap.sh).

PYTHON_VENV := $(CURDIR)/.venv/bin/python
READY := .venv/.ready

# Two workers of one thread each keep a two-core machine busy; more of either only makes them wait
# for each other.
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=

# Where `make bench` writes; commit the file, and bench/page.py shows it.
BENCH_RESULTS ?= bench/results/$(shell date +%Y-%m-%d).json
BENCH_ARGS ?=
BENCH_LOOP_ARGS ?=

.PHONY: setup test lint types pytest docs demo bench bench-smoke clean

setup: $(READY)

$(READY): pyproject.toml setup.py tools/bootstrap.sh $(wildcard autoload/*)
	tools/bootstrap.sh
	touch $@

test: lint types pytest

lint: $(READY)
	$(PYTHON_VENV) -m ruff check .
	$(PYTHON_VENV) -m ruff format --check .

types: $(READY)
	PYTHON=$(PYTHON_VENV) tools/typecheck.sh

pytest: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON_VENV) -m pytest -p no:benchmark -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

# The site, into site/. MkDocs checks links and anchors; a warning fails.
docs: .venv/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(PYTHON_VENV) -m mkdocs build --strict --quiet

.venv/.docs-ready: $(READY)
	$(PYTHON_VENV) -m pip --disable-pip-version-check install --quiet --no-build-isolation --editable '.[docs]'
	touch $@

demo: $(READY)
	$(PYTHON_VENV) examples/train_gpt.py $(DEMO_ARGS)

# Minutes on a GPU; other optimizers are measured where they are installed in .venv.
bench: $(READY)
	$(PYTHON_VENV) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make bench needs a CUDA GPU')"
	$(PYTHON_VENV) -m pytest bench --results $(BENCH_RESULTS) $(BENCH_ARGS)
	$(PYTHON_VENV) bench/train_loop.py --results $(basename $(BENCH_RESULTS))-loop.json $(BENCH_LOOP_ARGS)
	$(PYTHON_VENV) bench/table.py $(BENCH_RESULTS)
	$(PYTHON_VENV) bench/page.py
	$(PYTHON_VENV) bench/check.py $(if $(BENCH_ARGS),--partial) $(BENCH_RESULTS) || test $$? -eq 2 # nothing stored of this card

# Runs every benchmark once and tiny, so that they keep working.
bench-smoke: $(READY)
	$(PYTHON_VENV) -m pytest bench --smoke --benchmark-disable

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
