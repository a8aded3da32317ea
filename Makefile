# Every target works alone on a fresh clone: each makes .venv first where it is missing or out of date.

PYTHON ?= python3
SEED ?= 0
JOBS ?= 1
WORKERS ?= 3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS := 1
# tests start many processes: each would compile every module that it imports
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup demo chaos chaos-sweep test test-all coverage test-gpu gpu-trial fuzz test-hosts hosts-tools browser-tools lint types format zoo zoo-dozen zoo-third bench bench-planner bench-convergence bench-prediction bench-memory bench-restarts bench-checkpoints bench-replicas bench-readers bench-sweep bench-control bench-large bench-spilled bench-megatron docs docs-check docs-site check

help: ## what there is to make
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## the virtual environment .venv, with the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## a GPT in two pipeline stages against the plain loop, in about two minutes
	@$(BIN)/python docs/demo.py

test: $(READY) ## the tests that answer in minutes, in WORKERS processes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 25 -m "not slow and not hosts"

coverage: $(READY) ## the branches of the planner, the schedules and their data types that the pure tests leave out
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "not slow" tests/pure
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

test-all: $(READY) hosts-tools browser-tools ## all tests, also the slow ones and those on several hosts
	$(BIN)/python -m pytest

test-hosts: $(READY) hosts-tools ## training on several hosts: ssh, torchrun, a real SLURM; needs root
	$(BIN)/python -m pytest -m hosts tests/hosts tests/chaos

hosts-tools: ## what the tests on several hosts need, from Debian's packages; without them they are skipped, and say so
	@bash tests/support/hosts/tools.sh

browser-tools: ## Chromium, for the tests of report pages; without it they are skipped, and say so
	@bash tests/support/browser.sh

FUZZ ?= 3000
fuzz: $(READY) ## damage to every file that is read, at length: make fuzz FUZZ=100000
	AUTOPIPE_FUZZ_EXAMPLES=$(FUZZ) $(BIN)/python -m pytest --timeout 0 tests/pure/test_fuzz_files.py tests/one_process/cli/test_fuzz_commands.py

test-gpu: $(READY) ## the tests that need a GPU
	$(BIN)/python -m pytest tests/gpu

ARGUMENTS ?=
gpu-trial: ## what should hold on this machine's GPUs, into benchmarks/results/gpu.md, in 40 minutes; with PYTHON if its torch has CUDA
	@if $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then PYTHONPATH=. $(PYTHON) -m benchmarks.gpu_trial $(ARGUMENTS); \
	else $(MAKE) --no-print-directory setup && $(BIN)/python -m benchmarks.gpu_trial $(ARGUMENTS); fi

FAULTS ?= 100
HOST_FAULTS ?= $(if $(filter file,$(origin FAULTS)),30,0)
chaos: $(READY) hosts-tools ## single faults at random, here and on two hosts; one of them again: make chaos FAULTS=1 SEED=7
	PYTHONPATH=tests $(BIN)/python -m support.chaos.campaign --faults $(FAULTS) --host-faults $(HOST_FAULTS) --seed $(SEED) --jobs $(JOBS)

chaos-sweep: $(READY) ## single faults at random in a sweep; one of them again: make chaos-sweep FAULTS=1 SEED=7
	PYTHONPATH=tests $(BIN)/python -m support.chaos.sweeps --faults $(if $(filter file,$(origin FAULTS)),20,$(FAULTS)) --seed $(SEED)

lint: $(READY) ## ruff: rules and layout of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

format: $(READY) ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

zoo: $(READY) ## capture every kind of model that is known, and say what each needed
	$(BIN)/python -m benchmarks.zoo

zoo-dozen: $(READY) ## a dozen of them, in about two minutes
	$(BIN)/python -m benchmarks.zoo --representative --jobs 2 --limit 120

REPOSITORIES ?=
zoo-third: $(READY) ## models of public repositories, checked out in a folder: make zoo-third REPOSITORIES=FOLDER
	@test -n "$(REPOSITORIES)" || { echo "usage: make zoo-third REPOSITORIES=FOLDER (benchmarks/third_party/README.md lists them)"; exit 2; }
	$(BIN)/python -m benchmarks.third_party "$(REPOSITORIES)" --jobs $(JOBS)

bench: $(READY) ## speed: against torch's pipelining, the plain loop and the bound, in turn; ARGUMENTS="--quick" or "--cases bc"
	$(BIN)/python -m benchmarks.speed $(ARGUMENTS)

bench-planner: $(READY) ## how long the planner takes, how far from the best it is, and PipeDream's published speed-ups
	$(BIN)/python benchmarks/planner.py

bench-convergence: $(READY) ## what stale weights cost: 1f1b, 2bw and pipedream for the same number of samples
	$(BIN)/python benchmarks/convergence.py

bench-replicas: $(READY) ## what adding up the gradients of two replicas takes behind the backward
	$(BIN)/python benchmarks/replicas.py

bench-readers: $(READY) ## wide data parallel on images: rank 0 reads for all, or each rank reads
	$(BIN)/python benchmarks/readers.py

bench-prediction: $(READY) ## predicted against measured step time, every sample model
	$(BIN)/python benchmarks/prediction.py

bench-memory: $(READY) ## planned against measured peak bytes of each stage, every schedule
	$(BIN)/python benchmarks/memory.py

bench-restarts: $(READY) ## from kill -9 of a rank to the first step of the next attempt
	$(BIN)/python benchmarks/restarts.py

bench-sweep: $(READY) ## 16 settings of gpt.py as a sweep on two processes, against 16 plain loops
	$(BIN)/python benchmarks/sweep_overhead.py

bench-control: $(READY) ## rendezvous and supervisor of 64 and 512 ranks
	$(BIN)/python benchmarks/control_plane.py

bench-checkpoints: $(READY) ## what a checkpoint costs: against the disk's plain rate, and at every step of a training
	$(BIN)/python benchmarks/checkpoints.py

bench-large: $(READY) ## profile and plan models of 7 B and 70 B parameters, and build 2 B in parts
	$(BIN)/python benchmarks/large_models/measure.py

bench-spilled: $(READY) ## a model eight times as large as its device; ARGUMENTS="--device cuda" compares with FSDP2
	$(BIN)/python -m benchmarks.spilled $(ARGUMENTS)

bench-megatron: $(READY) ## the planner's choice and prediction for Megatron-LM's models of 1.7 B to 1 T parameters
	$(BIN)/python benchmarks/megatron.py $(ARGUMENTS)

docs: $(READY) ## write docs/cli.md, docs/api.md, docs/troubleshooting.md and the pictures from the source
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_troubleshooting.py
	$(BIN)/python docs/make_pictures.py

docs-check: $(READY) ## compare the generated pages of docs/ with the source
	$(BIN)/python docs/make_cli.py --check
	$(BIN)/python docs/make_api.py --check
	$(BIN)/python docs/make_troubleshooting.py --check
	$(BIN)/python docs/make_pictures.py --check

docs-site: $(READY) ## the pages as a site that works offline, in build/site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site -d build/site-doctrees . build/site
	@echo build/site/index.html

check: $(READY) ## everything that a change must pass: lint, types, docs, a dozen of the zoo, tests
	@$(MAKE) --no-print-directory -j 2 lint types docs-check
	@$(MAKE) --no-print-directory zoo-dozen
	@$(MAKE) --no-print-directory test
