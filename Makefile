# Everything starts here: `make help`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The versions that were tested; some of them need Python 3.11. For the shell: make would ask before there is a python.
PINS = $$($(BIN)/python -c 'import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-core test-oldest test-rest test-all test-pair explore simulate check format build bench race contest long-texts load notebooks docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv and install everything (2 to 5 minutes the first time, nothing after that)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch, transformers and the development tools (2 to 5 minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[bench,dev,docs]'
	@touch $@

demo: setup ## a real draft and target answer a coding question together (first time: 1.6 GB to download, 3 to 15 minutes)
	@$(BIN)/langchain-card chat --demo

# Two processes: on two cores that is nearly twice as fast, and more of them would only wait for each other.
PYTEST = $(BIN)/python -m pytest
TWO = -n 2 --dist loadfile

test: setup ## what a change is tested with: every area, no test over a few seconds (minutes; first time: 93 MB to download)
	@$(PYTEST) $(TWO) -m "not slow and not pair"

test-core: setup ## the parts that need no model and no process (under a minute)
	@$(PYTEST) -m "not slow and not pair" tests/core tests/text/test_detokenizer.py tests/text/test_call_reader.py

test-rest: setup ## what `make test` leaves out (20 to 30 minutes on two cores)
	@$(PYTEST) $(TWO) -m "slow and not pair"

test-all: test test-rest ## every test that does without the built-in pair (30 to 40 minutes on two cores)

# The floor of pyproject.toml; a folder that comes before the environment is enough for it.
OLDEST := $(shell sed -n 's/.*"langchain-core>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST_TESTS = tests/chat/test_langchain_suite.py tests/chat/test_chat_model.py tests/chat/test_cancel.py \
	tests/chat/tools/test_structured.py tests/chat/tools/test_through_the_model.py

# deepagents requires a newer anthropic than tests of tokenizers do, and imports it only where it is used. Python 3.11.
DEEPAGENTS = deepagents==0.7.32 wcmatch==12.0.1 bracex==3.2.3
DEEPAGENTS_TESTS = tests/chat/tools/test_deep_agents.py "tests/repo/test_cookbook.py::test_the_notebook_runs[deep_agent]"
DEEPAGENTS_FOLDER = $(VENV)/$(firstword $(DEEPAGENTS))

test-oldest: setup ## the chat model with the oldest langchain-core that it takes, and with deepagents (three minutes)
	@test -d $(VENV)/oldest-$(OLDEST) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)/oldest-$(OLDEST) langchain-core==$(OLDEST)
	@PYTHONPATH=$(VENV)/oldest-$(OLDEST) $(PYTEST) $(TWO) -m "not slow and not pair" $(OLDEST_TESTS)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || exit 0; \
		test -d $(DEEPAGENTS_FOLDER) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(DEEPAGENTS_FOLDER) $(DEEPAGENTS) || exit 1; \
		export PYTHONPATH=$(DEEPAGENTS_FOLDER); $(BIN)/python -c 'import deepagents' && $(PYTEST) $(TWO) $(DEEPAGENTS_TESTS)

test-pair: setup ## the tests that need the built-in pair (about an hour on two cores)
	@$(PYTEST) -m pair

explore: setup ## many more interleavings, schedules and tokens than `make test` (about an hour on two cores)
	@CARD_EXPLORE=1 $(BIN)/python -m pytest -k "explor or planted or invariant or exact or random_schemas or every_answer"

# Folders whose tests run engines.
SIMULATED = tests/engine tests/drafters tests/heads tests/constraints tests/acceptance tests/decisions
PLACEMENTS ?= "two devices" "one device" "target over both" "draft on the CPU"
EXECUTIONS ?= eager graphs

simulate: setup ## engine tests on simulated CUDA devices, in all PLACEMENTS and EXECUTIONS (hours on two cores)
	@failed=0; for placement in $(PLACEMENTS); do for execution in $(EXECUTIONS); do echo "$$placement, $$execution"; \
		$(PYTEST) -p tests.simulation.on_devices --placement "$$placement" --execution $$execution --timeout 3600 \
		-m "not slow and not pair" $(SIMULATED) || failed=1; done; done; exit $$failed
	@CARD_EXPLORE=1 $(PYTEST) tests/simulation/test_cuda_exactness.py

check: setup ## lint, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup ## format the code
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

build: setup ## wheel and sdist in dist/, and the wheel tried in an empty environment (2 to 6 minutes)
	@rm -rf dist
	@$(BIN)/python -m hatchling build -d dist
	@PYTHON=$(BIN)/python .ci/smoke dist/*.whl

bench: setup ## the real pair: all schedules side by side (about 12 minutes on two cores)
	@$(BIN)/langchain-card bench

contest: setup ## docs/performance.md: this engine against others on a virtual clock (about half an hour on two cores)
	@$(BIN)/python -m benchmarks.contest --json docs/performance.json --plot docs/performance.png
	@$(BIN)/python -m benchmarks.contest.tables

# Files of JSON lines with other sets of prompts than HumanEval, or NAME=FILE for each.
SETS ?=
RACE ?= docs/race.json

race: setup ## README, docs/performance.md: this engine against tuned peers on HumanEval and SETS (an hour or two; needs the peers)
	@$(BIN)/python benchmarks/race.py HumanEval=humaneval $(SETS) --json $(RACE)
	@$(BIN)/python -m benchmarks.race_page $(RACE)

long-texts: setup ## docs/performance.md: this engine, llama.cpp and OpenVINO on long texts (half an hour; needs both)
	@$(BIN)/langchain-card bench --context 300 1000 3000 7000 --answer 16 64 256 --methods card llama-server openvino \
		--json docs/long_texts.json --plot docs/long_texts.png
	@$(BIN)/python -m benchmarks.bench_page long-texts

load: setup ## docs/performance.md: 1 to 16 requests at once (an hour or two; needs the built-in pair)
	@$(BIN)/langchain-card bench --load --json docs/load.json --plot docs/load.png
	@$(BIN)/python -m benchmarks.bench_page load

notebooks: setup ## execute the cookbook and store its outputs
	@$(BIN)/python .ci/notebooks.py

docs: setup ## the documentation site, in site/ (about 10 seconds); every link and anchor is checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in site/; to read it: $(BIN)/mkdocs serve"

clean: ## remove .venv, dist/, site/ and caches of tools; downloaded models stay (`langchain-card models rm NAME`)
	@rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
