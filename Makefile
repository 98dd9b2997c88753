# Every target sets the project up first, where that has not been done: .venv, pinned versions, editable.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SWEEP ?= -m sharding=root,per_block precision=fp32 offload=none reshard_after_forward=always,never

.PHONY: sweep help test ci test-ci test-cluster test-all test-gpu screenshots lint format docs docs-serve ui bench published forecast wheel clean

sweep: $(VENV)/.installed   ## the sweep of the README: sharding x reshard_after_forward on the bundled digits
	$(PY) -m fsdp_lab $(SWEEP)

help:                       ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ {printf "%-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# Two files of tests side by side, one a core. tests/conftest.py lists the files that start first.
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed    ## the tests that guard every value of every axis, in some minutes, after ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PYTEST) -m "not (ci or full or cluster or ui or gpu)" $(ARGS)

ci:                         ## what CI runs: make test, lint, docs, kills, damage, clusters; 35 minutes
	.ci/run

# The last part of `make ci`.
test-ci: $(VENV)/.docs $(VENV)/float8
	$(PYTEST) -m "ci and not (full or cluster or ui or gpu)" $(ARGS)
	$(FLOAT8) $(ARGS)

# Clusters share ports and network namespaces, so these tests run one after another. They wait more than they compute.
test-cluster: $(VENV)/.cluster
	$(PY) -m pytest tests/cluster -m "cluster and not full" $(ARGS)

test-all: $(VENV)/.docs $(VENV)/float8 $(VENV)/.cluster $(VENV)/.browser ## all tests, full grids, planted faults, other versions, the browser, speeds: every night
	@failed=0; \
	$(PYTEST) -m "not (cluster or ui)" $(ARGS) || failed=1; \
	$(FLOAT8) $(ARGS) || failed=1; \
	$(PY) -m pytest tests/cluster -m cluster $(ARGS) || failed=1; \
	FSDP_LAB_UI=1 $(PY) -m pytest -m ui $(ARGS) || failed=1; \
	$(PY) -m tests.faults || failed=1; \
	$(PY) -m tests.versions || failed=1; \
	$(MAKE) bench || failed=1; \
	exit $$failed

GPU = losses memory speed failures files ray # the most valuable first: a time limit cuts the last ones
test-gpu:                   ## what only a GPU can show; needs torch, torchvision and pytest only: PYTHON=...
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini $(GPU:%=tests/gpu/test_%.py) $(ARGS)

# Slurm, PostgreSQL and network namespaces need root to install and to run; without it their tests are skipped by name.
APT = apt-get install -y -qq --no-install-recommends
$(VENV)/.cluster: $(VENV)/.installed
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev,jobs]"
	@test $$(id -u) != 0 || { command -v sbatch && ls /usr/lib/postgresql/*/bin/initdb; } >/dev/null 2>&1 \
	  || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(APT) postgresql slurm-wlm; }
	@test $$(id -u) != 0 || touch $@

$(VENV)/.browser: $(VENV)/.installed
	@command -v chromium >/dev/null || { test $$(id -u) = 0 || sudo=sudo; $$sudo apt-get update -qq \
	  && $$sudo $(APT) chromium fonts-dejavu-core; }
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev,browser]"
	@touch $@

screenshots: $(VENV)/.browser ## docs/screenshots, drawn again in Chromium
	FSDP_LAB_UI=1 FSDP_LAB_SCREENSHOTS=docs/screenshots $(PY) -m pytest -m ui

lint: $(VENV)/.installed    ## ruff, with the packages' import rules, mypy, and what is imported against what is declared
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m deptry .

format: $(VENV)/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Material tells of its successor at each build. Not --quiet: that hides warnings from --strict, too.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs

docs: $(VENV)/.docs         ## the pages in site/, strictly: a broken link or an unlisted page fails; open site/index.html
	$(MKDOCS) build
	@echo "site/index.html"

docs-serve: $(VENV)/.docs   ## the pages as you write them, http://127.0.0.1:8000
	@$(call is_free,$(or $(PORT),8000))
	$(MKDOCS) serve --dev-addr 127.0.0.1:$(or $(PORT),8000)

$(VENV)/.docs: $(VENV)/.installed
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

# torchao stands beside what is installed: where it is found, transformers imports it, and it prints warnings.
FLOAT8 = PYTHONPATH=$(VENV)/float8 $(PY) -m pytest tests/training/test_precision.py -m ci
$(VENV)/float8: $(VENV)/.installed
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --no-deps --target $@ torchao

# MLflow prints the address of a port that is in use, too, and exits with 0.
is_free = $(PY) -c 'import socket; socket.create_server(("127.0.0.1", $(1)))' 2>/dev/null \
  || { echo "port $(1) of 127.0.0.1 cannot be used; choose another: make $@ PORT=8001" >&2; exit 1; }

UI = http://127.0.0.1:$(or $(PORT),5000)/\#/experiments?workflowType=machine_learning
ui: $(VENV)/.installed      ## serves the runs of the local store in MLflow, http://127.0.0.1:5000
	@$(call is_free,$(or $(PORT),5000))
	@echo "in some ten seconds (Ctrl-C ends it) the runs: $(UI)"
	@PYTHONWARNINGS=ignore exec $(PY) -m mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db --host 127.0.0.1 --port $(or $(PORT),5000)

bench: $(VENV)/.installed   ## sweep and trial against bare scripts; 500 pretended trials; a large cluster
	$(PY) -m benchmarks.sweep
	$(PY) -m benchmarks.scale cost
	$(PY) -m benchmarks.throughput
	$(PY) -m benchmarks.scale slots

published: $(VENV)/.installed  ## forecasts of time and memory against published steps: an hour on two cores
	$(PY) -m benchmarks.published $(ARGS)

forecast: $(VENV)/.installed  ## the memory of the README's sweep, for GPUs, in half a minute
	$(PY) -m fsdp_lab.forecast forecast.device=cuda $(SWEEP)

wheel: $(VENV)/.installed
	$(PY) -m uv build --wheel --out-dir dist .

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "fsdp_lab needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import uv' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check uv
	@echo "installing the pinned versions into $(VENV) (about 7 GB with PyTorch; two or three minutes)"
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev]"
	@# to bytecode now, once: otherwise the many processes of a trial each compile PyTorch, some of them every time
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

clean:
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache .mypy_cache
