# Every target sets the project up first, where that has not been done: .venv, pinned versions, editable.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SWEEP ?= -m sharding=root,per_block precision=fp32 offload=none reshard_after_forward=always,never

.PHONY: sweep help test test-long test-cluster test-fast test-oldest test-ui lint format docs docs-serve ui bench bench-speed published-speed check-gpu check-gpu-ray gpu-wheels forecast wheel clean

sweep: $(VENV)/.installed   ## the sweep of the README: sharding x reshard_after_forward on the bundled digits
	$(PY) -m fsdp_lab $(SWEEP)

help:                       ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ {printf "%-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# Three files of tests side by side on two cores: much of a test is waiting for processes to start.
# tests/conftest.py says which files begin.
PYTEST := $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed    ## the tests, but for those that take longest
	$(PYTEST) -m "not long and not cluster and not alone"

test-long: $(VENV)/.docs    ## the tests that `make test` leaves out: kills, nights, every pair of settings, the pages
	$(PYTEST) -m "long and not cluster and not alone" $(ARGS)
	$(PY) -m pytest -m alone

test-cluster: $(VENV)/.installed  ## object storage, PostgreSQL, and sweeps over two nodes, as network namespaces, by Ray and by Slurm: as root, elsewhere they are skipped
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { test $$(id -u) = 0 && apt-get update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql; } \
	  || echo "no PostgreSQL here: its tests are skipped"
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev,jobs]"
	@command -v sbatch >/dev/null || { test $$(id -u) = 0 && apt-get update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; } \
	  || echo "no Slurm here: its tests are skipped"
	$(PYTEST) -m cluster $(ARGS)

test-fast: $(VENV)/.installed
	$(PYTEST) -m "not slow and not long and not cluster and not alone"

test-oldest: $(VENV)/.installed ## a sweep with the oldest versions that pyproject.toml declares, in an environment of its own
	$(PY) -m tests.oldest

test-ui: $(VENV)/.installed ## MLflow's pages and ours in a real browser, about four minutes; makes docs/screenshots
	@command -v chromium >/dev/null || { test $$(id -u) = 0 || sudo=sudo; $$sudo apt-get update -qq \
	  && $$sudo apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev,browser]"
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
	$(MKDOCS) serve --dev-addr 127.0.0.1:$(or $(PORT),8000)

$(VENV)/.docs: $(VENV)/.installed
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

UI = http://127.0.0.1:$(or $(PORT),5000)/\#/experiments?workflowType=machine_learning
ui: $(VENV)/.installed      ## opens the runs of the local store in MLflow, http://127.0.0.1:5000
	@echo "in some ten seconds (Ctrl-C ends it) the runs: $(UI)"
	@$(PY) -m fsdp_lab.open_page '$(UI)' & PYTHONWARNINGS=ignore exec $(PY) -m mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db --host 127.0.0.1 --port $(or $(PORT),5000)

bench: $(VENV)/.installed   ## sweep and trial against bare scripts; 500 pretended trials; a large cluster; turnaround; what measuring and forecasting memory cost; runs of repeat=auto
	$(PY) -m benchmarks.sweep
	$(PY) -m benchmarks.scale cost
	$(PY) -m benchmarks.turnaround
	$(PY) -m benchmarks.memory
	$(PY) -m benchmarks.auto_repeat
	$(PY) -m benchmarks.throughput
	$(PY) -m benchmarks.scale slots

bench-speed: $(VENV)/.installed  ## predicted against measured steps of 48 settings on this CPU, calibration included: a quarter of an hour
	$(PY) -m benchmarks.speed $(ARGS)

published-speed: $(VENV)/.installed  ## speed forecasts against published steps: half an hour, then five minutes
	$(PY) -m benchmarks.published_speed $(ARGS)

check-gpu:                  ## correctness, memory and speed on this machine's GPUs; needs torch and torchvision only: PYTHON=...
	$(PYTHON) -m benchmarks.check_gpu $(ARGS)

check-gpu-ray:              ## real sweeps on this machine's GPUs; needs all that fsdp_lab needs: PYTHON=...
	$(PYTHON) -m benchmarks.check_gpu_ray $(ARGS)

gpu-wheels: $(VENV)/.installed  ## what check-gpu-ray needs beside PyTorch, as wheels in parts, for a machine without network
	$(PY) -m benchmarks.check_gpu_ray.wheels $(ARGS)

forecast: $(VENV)/.installed  ## the memory of the README's sweep, for GPUs, in half a minute
	$(PY) -m fsdp_lab.forecast forecast.device=cuda $(SWEEP)

wheel: $(VENV)/.installed
	$(PY) -m uv build --wheel --out-dir dist .

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "fsdp_lab needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import uv' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check uv
	@echo "installing the pinned versions into $(VENV) (about 5 GB with PyTorch; a minute or two)"
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --editable ".[dev]"
	@# to bytecode now, once: otherwise the many processes of a trial each compile PyTorch, some of them every time
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

clean:
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache .mypy_cache
