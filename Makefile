# Two commands on a fresh machine: `make demo` shows it, `make test` checks it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= runs/demo

.PHONY: help demo demo-deploy test test-all coverage race lint docs hooks clean

help:
	@echo "make demo   install into $(VENV) and compare six methods on the embedded data (under a minute)"
	@echo "make demo-deploy  install Flower too; a server and three sites on this machine, compared with the simulation"
	@echo "make demo-deploy PROTECTED=1  the same with differential privacy, secure aggregation and a policy at every site"
	@echo "make test   install into $(VENV) and run the fast tests (under three minutes on two cores)"
	@echo "make test-all  all tests"
	@echo "make coverage  all tests, and which lines they reach (takes longer)"
	@echo "make race DATA=DIR  fedhelix against pfl, Flower, BlazeFL and a plain loop on the CPU (under ten minutes; DIR holds fashion_mnist.npz)"
	@echo "make lint   formatting, lint and types"
	@echo "make docs   the site with all documentation, in build/site"
	@echo "make hooks  check every commit with pre-commit"
	@echo "make clean  remove $(VENV) and what the tools leave behind"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.deployment: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[flower,privacy]"
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,export,flower,hf,ray,report,track,tune,docs,privacy]"
	@touch $@

demo: $(VENV)/.runtime
	@rm -rf $(DEMO)
	$(BIN)/fedhelix compare helix fedavg fedavg-ft genfed gene-fl pfedgpa --rounds 20 --eval-every 4 --engine parallel --out $(DEMO)
	@echo "The figure is $(DEMO)/comparison.png; each run's config, metrics and checkpoint lie beside it."
	@echo "To go on, put the commands on your path: . $(BIN)/activate"

demo-deploy: $(VENV)/.deployment
	$(BIN)/python examples/deployment.py $(if $(PROTECTED),--protected,genfed 5)

test: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-all: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

coverage: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --cov --cov-report=term

race: $(VENV)/.development
	$(BIN)/python benchmarks/speed/cpu.py --calibrate 0 --rounds 6 --warm-up 1 --guest-rounds 3 \
		--contestants fedhelix pfl flower blazefl plain --out benchmarks/results/race.json $(if $(DATA),--data-dir $(DATA))

hooks: $(VENV)/.development
	@command -v pre-commit > /dev/null || { echo "install pre-commit first, e.g. with: pipx install pre-commit" >&2; exit 2; }
	pre-commit install

lint: $(VENV)/.development
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell src docs README.md CHANGELOG.md CONTRIBUTING.md --skip "*.svg,*.png,*.c,*.h,*.js,*.ipynb"

docs: $(VENV)/.development
	$(BIN)/python docs/make.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
