# make install create the environment: .venv
# make sweep   create the environment, run the default sweep, write the report
# make test    create the environment, run the checks and all tests: two processes share most of them, a third has those
#              with SLURM; the last lines of each part say which tests did not run, and why
# make quick   the tests that start no process groups
# make timing  the tests that compare step times, on a machine with nothing else to do; no part of make test
# make test-slurm      the tests that need SLURM, and fail without
# make predictions     predict the sweeps of results/predicted anew, and their figures
# make notebooks       execute the notebooks of analysis/ and render them to build/notebooks/*.html
# make cluster         bring up a SLURM of two emulated nodes on this machine, see slurm/README.md
# make cluster-down    take it down and forget it
PYTHON ?= python3
VENV   ?= .venv
STORE  ?= runs
BIN    := $(VENV)/bin
PREDICTED := results/predicted
PAPER  := model_scale prefetch rate_limiter gpt_175b_scale t5_11b_scale memory sharding_factor

.PHONY: install sweep test quick test-slurm timing predictions notebooks cluster cluster-down lint types clean

install: $(VENV)/.installed

sweep: $(VENV)/.installed
	$(BIN)/python -m bench.sweep store=$(STORE)

# Tests with SLURM mostly wait, which others can do beside them. Each process has a SLURM of its own.
APART := tests/test_slurm_calibrate.py tests/test_slurm_cluster_script.py tests/test_slurm_faults.py tests/test_slurm_sweep.py \
  tests/test_slurm_tracking.py

# Tests that compare times need a machine on which nothing else runs, and say so if it is not.
TIMING := tests/test_cpu_times.py

test: lint types
	@log=$$(mktemp); status=0; \
	$(BIN)/python -m pytest --durations=15 $(APART) >"$$log" 2>&1 & apart=$$!; \
	trap 'kill $$apart 2>/dev/null; rm -f "$$log"' EXIT; \
	$(BIN)/python -m pytest --durations=25 --numprocesses=2 --dist=loadfile $(APART:%=--ignore=%) $(TIMING:%=--ignore=%) || \
	  status=$$?; \
	wait $$apart || status=$$?; cat "$$log"; exit $$status

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow"

test-slurm: $(VENV)/.installed
	REQUIRE_SLURM=1 $(BIN)/python -m pytest -k slurm

timing: $(VENV)/.installed
	$(BIN)/python -m pytest $(TIMING)

predictions: $(VENV)/.installed
	rm -rf $(PREDICTED)/*/ build/predictions
	for sweep in $(PAPER) "sharding_factor model=t5_11b"; do \
	  $(BIN)/python -m bench.sweep sweep=$$sweep mode=predict hardware=a100_80gb \
	    store=$(PREDICTED)/a100_80gb report=false || exit; \
	done
	$(BIN)/python -m bench.sweep sweep=oom_frontier mode=predict hardware=a100_80gb \
	  store=$(PREDICTED)/oom_frontier report=false
	$(BIN)/python -m bench.sweep sweep=oom_frontier_cpu mode=predict store=$(PREDICTED)/cpu_frontier report=false
	for model in t5_mini "gpt_mini model.activation=gelu_new"; do \
	  $(BIN)/python -m bench.sweep sweep=memory_cpu model=$$model mode=predict \
	    store=$(PREDICTED)/cpu_memory report=false || exit; \
	done
	$(BIN)/python -m bench.report $(PREDICTED)/a100_80gb --output build/predictions
	$(BIN)/python -m bench.report $(PREDICTED)/oom_frontier --output build/predictions/frontier
	mkdir -p $(PREDICTED)/figures
	cp build/predictions/figures/paper-*.png build/predictions/figures/sharding-factor-t5-2b-bf16-64.png \
	  build/predictions/figures/sharding-factor-t5-11b-bf16-64.png \
	  build/predictions/frontier/figures/frontier-*.png $(PREDICTED)/figures/

notebooks: $(VENV)/.installed
	$(BIN)/python -m bench.notebooks

cluster:
	@slurm/test-cluster start

cluster-down:
	@slurm/test-cluster stop --remove

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# torch first: with the pinned version there already, nothing else that asks for torch brings another.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
