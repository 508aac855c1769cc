# make install create the environment: .venv
# make sweep   create the environment, run the default sweep, write the report
# make test    create the environment, run the checks and the tests: three processes share most of them, two have those
#              with SLURM, and when they are through come, one by one, those that hold processor time against a limit;
#              of long tests one in 100 runs, others with every commit; the last lines of each part say which tests did
#              not run, and why
# make test-all   the same with all long tests, as does make test-extras LONG_TESTS_ONE_IN=1
# make quick   the tests that take less than half a second each: a minute on two cores
# make timing  the tests that compare step times, and how fast questions are answered in units of importing torch and
#              transformers, on a machine with nothing else to do; no part of make test
# make scale   what `make test` does for some, for 10,000 rows (reported within a minute and 1 GB), 4,000 predictions, every
#              measured row, all layouts of 20 questions and 60 runs that are drawn anew
# make fuzz    generated command lines and damaged stores, others every time, for MINUTES=10 or SECONDS=600; what failed is
#              kept in build/hypothesis and tried again first
# make extras          install the optional extras: DeepSpeed, Accelerate, Lightning, peft, bitsandbytes, torchao, MLflow,
#              JupyterLab
# make test-extras     the tests that need them
# make kills   100 kills at random moments of sweeps, here and on a SLURM of its own: nothing measured may be lost
# make test-slurm      the tests that need SLURM, and fail without
# make predictions     predict the sweeps of results/predicted anew, and Figure 7(c); equal numbers change no row
# make layout-map      predict results/pictures/layout-map-h100.png anew: minutes
# make docs            build the site of docs/ to build/docs/html: warnings are errors, commands on pages are executed
# make docs-serve      show it on http://localhost:8000
# make notebooks       execute the notebooks of analysis/ and render them to build/notebooks/*.html
# make cluster         bring up a SLURM of two emulated nodes on this machine, see slurm/README.md
# make cluster-down    take it down and forget it
PYTHON ?= python3
VENV   ?= .venv
STORE  ?= runs
BIN    := $(VENV)/bin
# Tests start hundreds of processes: each finds its modules compiled.
export PYTHONDONTWRITEBYTECODE :=
PREDICTED := results/predicted
PAPER  := model_scale prefetch rate_limiter dhen_scale gpt_175b_scale t5_11b_scale memory sharding_factor

.PHONY: install sweep test test-all quick fuzz scale kills test-slurm timing predictions layout-map docs docs-serve notebooks cluster cluster-down lint types clean

install: $(VENV)/.installed

sweep: $(VENV)/.installed
	$(BIN)/python -m bench.sweep store=$(STORE)

# Tests with SLURM mostly wait, which others can do beside them. Each process has a SLURM of its own.
APART := $(filter-out tests/launch/test_slurm_units.py tests/launch/test_slurm_profiles.py,$(wildcard tests/launch/test_slurm_*.py))

# Tests that compare times need a machine on which nothing else runs, and say so if it is not.
TIMING := tests/calibration/test_cpu_times.py tests/prediction/test_answer_times.py

# Long tests: one in so many, drawn anew with every commit.
test test-extras: export LONG_TESTS_ONE_IN := 100

test-all:
	$(MAKE) test LONG_TESTS_ONE_IN=1

test: lint types
	@log=$$(mktemp); status=0; \
	$(BIN)/python -m pytest -m "not alone" --durations=15 --numprocesses=2 --dist=loadfile $(APART) >"$$log" 2>&1 & apart=$$!; \
	trap 'kill $$apart 2>/dev/null; rm -f "$$log"' EXIT; \
	$(BIN)/python -m pytest -m "not alone" --durations=25 --numprocesses=3 --dist=loadfile \
	  $(APART:%=--ignore=%) $(TIMING:%=--ignore=%) || status=$$?; \
	wait $$apart || status=$$?; cat "$$log"; \
	$(BIN)/python -m pytest -m alone --durations=15 $(TIMING:%=--ignore=%) || status=$$?; exit $$status

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow and not alone" --numprocesses=2 --dist=loadfile --quiet

MINUTES ?= 10
SECONDS ?= $(shell expr 60 \* $(MINUTES))
FUZZED  := tests/config/test_hostile_input.py tests/records/test_store_fuzz.py

fuzz: $(VENV)/.installed
	@end=$$(expr $$(date +%s) + $(SECONDS)); \
	while [ $$(date +%s) -lt $$end ]; do \
	  HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -x --timeout=0 $(FUZZED) || exit; \
	done

scale: $(VENV)/.installed
	SCALE=1 $(BIN)/python -m pytest -m alone --durations=5
	SCALE=1 $(BIN)/python -m pytest -m "not alone" tests/prediction/test_predicted_memory.py tests/advice/test_layouts.py \
	  --durations=5

# DeepSpeed has no wheel, and what builds it needs torch.
extras: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[accelerate,lightning,peft,bitsandbytes,fp8,mlflow,jupyterlab]"
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt deepspeed

test-extras: $(VENV)/.installed
	$(BIN)/python -m pytest --durations=10 --numprocesses=2 --dist=loadfile -m needs

KILLS := 100

kills: $(VENV)/.installed
	$(BIN)/python -m tests.kills --kills $(KILLS)

test-slurm: $(VENV)/.installed
	REQUIRE_SLURM=1 $(BIN)/python -m pytest -k slurm

timing: $(VENV)/.installed
	$(BIN)/python -m pytest $(TIMING)

predictions: $(VENV)/.installed
	rm -rf build/predictions
	for sweep in $(PAPER) "sharding_factor model=t5_11b"; do \
	  $(BIN)/python -m bench.sweep sweep=$$sweep mode=predict hardware=a100_80gb \
	    +hardware.speeds.records_nccl_stream=true store=build/predictions/a100_80gb report=false || exit; \
	done
	$(BIN)/python -m bench.sweep sweep=oom_frontier mode=predict hardware=a100_80gb \
	  store=build/predictions/oom_frontier report=false
	$(BIN)/python -m bench.sweep sweep=oom_frontier_cpu mode=predict store=build/predictions/cpu_frontier report=false
	$(BIN)/python -m bench.sweep sweep=claims mode=predict store=build/predictions/claims report=false
	for model in t5_mini "gpt_mini model.activation=gelu_new"; do \
	  $(BIN)/python -m bench.sweep sweep=memory_cpu model=$$model mode=predict \
	    store=build/predictions/cpu_memory report=false || exit; \
	done
	for store in a100_80gb oom_frontier cpu_frontier cpu_memory claims; do \
	  $(BIN)/python -m bench.records pack build/predictions/$$store --output $(PREDICTED)/$$store \
	    --replace-predictions || exit; \
	done
	$(BIN)/python -m bench.report $(PREDICTED)/a100_80gb --output build/predictions/report
	cp build/predictions/report/figures/paper-figure-7-c.png results/pictures/

layout-map: $(VENV)/.installed
	$(BIN)/python -m bench.predict map model=llama3_8b,llama3_70b,llama3_405b gpus=64,256,1024,4096 \
	  hardware=h100_80gb sequence_length=8192 \
	  figure=results/pictures/layout-map-h100.png

notebooks: $(VENV)/.installed
	$(BIN)/python -m bench.notebooks

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet docs build/docs/html

docs-serve: docs
	$(BIN)/python -m http.server --directory build/docs/html --bind 127.0.0.1 8000

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
