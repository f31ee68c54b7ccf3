# make search: set up and run the quickstart study.   make test: set up and run everything CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Build isolation sees the same exact versions as the install itself.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The processes of the tests, hundreds, share what the first of them compiled, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

define check_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
  { echo "raysearch needs Python >= 3.11, but $(PYTHON) is $$($(PYTHON) --version 2>&1 || true); choose another: make PYTHON=python3.11 ..." >&2; exit 1; }
endef

# What runs beside each other, in the order in which it begins.
LANES := slow-others quick-others slow-simulators types slow-learning quick-answers slow-studies quick-learning slow-processes quick-sim slow-sim pages

.PHONY: help search test test-cluster fuzz docs check $(LANES) quick-tests slow-tests setup setup-dev hashes clean

help:
	@echo "make search        set up .venv and run the quickstart study"
	@echo "make test          set up .venv with the development tools; lint, type-check and test"
	@echo "make docs          build the documentation's site into build/docs"
	@echo "make test-cluster  test on several hosts; needs root, sshd, rsync and iproute2"
	@echo "make fuzz          damage and forge files, options and names at random (10 N = 20,000 inputs per reader, and a hundredth of it where each is a whole run or process), stop studies at 30 moments and each of their processes"
	@echo "make setup         set up .venv"
	@echo "make hashes        renew requirements*.txt after a change of constraints.txt; needs uv"
	@echo "make clean         remove .venv and build products (results/ stays)"

search: setup
	$(BIN)/raysearch study configs/studies/quickstart.toml

test: setup-dev check

test-cluster: setup-dev
	$(BIN)/pytest -m cluster

fuzz: setup-dev
	RAYSEARCH_FUZZ=$(or $(N),2000) $(BIN)/pytest --timeout 36000 tests/raysearch/test_fuzz.py tests/raysearch/test_readers.py tests/raysearch/test_forged_states.py tests/raysearch/test_trust.py tests/raysearch/deploy/export/test_render.py tests/raysearch/deploy/replay/test_trace_files.py tests/raysearch/fidelity/calibration/test_public_database.py tests/raysearch/fidelity/calibration/test_tuned_tables.py tests/raysearch/fidelity/forecasts/test_forecasts.py tests/raysearch/searchers/test_prior.py tests/raysearch/pretraining tests/raysearch/deploy/live/test_deployed_benchmark.py tests/sim/config/test_hostile_configurations.py tests/sim/optimum/test_exactness.py tests/sim/prices tests/sim/sharding
	RAYSEARCH_FUZZ=1 $(BIN)/pytest -m slow tests/raysearch/processes/test_supervision.py tests/raysearch/processes/test_chaos.py -k 'any_moment or chaos'

docs: setup-dev pages
	@echo "built: build/docs/index.html; $(BIN)/mkdocs serve shows it and follows changes"

LAST := nice -n 5
check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	@# Lanes that wait for processes beside lanes that compute and let them go first; more at once only share caches.
	$(MAKE) --no-print-directory -j4 --output-sync=line $(LANES)

pages: # without the makers' notice about versions to come
	NO_MKDOCS_2_WARNING=1 $(LAST) $(BIN)/mkdocs build --strict --quiet

types:
	$(LAST) $(BIN)/pyright

# Four lanes: one process would be the last to end.
QUICK := $(LAST) $(BIN)/pytest -m 'not slow and not cluster'
QUICK_SIM := tests/sim tests/envs
ANSWERS := tests/raysearch/cli tests/raysearch/deploy
LEARNING := tests/raysearch/searchers tests/raysearch/pretraining tests/raysearch/runs tests/test_rllib_page.py
# Modules with examples: the others need no import for these.
examples = $(shell grep -rl --include=*.py '^ *>>> ' $(subst tests/raysearch,raysearch,$(filter tests/raysearch%,$(1))))
quick-tests: $(filter quick-%,$(LANES))

quick-sim:
	$(QUICK) $(QUICK_SIM) sim envs

quick-answers:
	$(QUICK) $(ANSWERS) $(call examples,$(ANSWERS))

quick-learning:
	$(QUICK) $(LEARNING) $(call examples,$(LEARNING))

quick-others:
	$(QUICK) tests $(filter-out $(call examples,$(ANSWERS) $(LEARNING)),$(call examples,tests/raysearch)) $(addprefix --ignore=,tests/examples/layers $(QUICK_SIM) $(ANSWERS) $(LEARNING))

# Six lanes, each with processes, ports and folders of its own; all in tests/: the other folders have examples alone.
SLOW := $(BIN)/pytest -m 'slow and not cluster'
PROCESSES := tests/raysearch/processes
STUDIES := tests/raysearch/studies
SIMULATORS := tests/raysearch/simulators tests/cluster
slow-tests: $(filter slow-%,$(LANES))

slow-learning:
	$(SLOW) $(LEARNING)

slow-processes:
	$(SLOW) $(PROCESSES)

slow-studies:
	$(SLOW) $(STUDIES)

slow-simulators:
	$(SLOW) $(SIMULATORS)

slow-sim: # which waits for nothing
	$(LAST) $(SLOW) $(QUICK_SIM)

slow-others:
	$(SLOW) tests $(addprefix --ignore=,$(LEARNING) $(PROCESSES) $(STUDIES) $(SIMULATORS) $(QUICK_SIM))

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# First what has a known digest, whichever index it comes from; then what is left: PyTorch, which has a build per machine.
$(VENV)/.installed: pyproject.toml constraints.txt requirements.txt
	@$(check_python)
	@echo "Setting up $(VENV): a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[search,rllib]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt requirements.txt requirements-dev.txt
	@$(check_python)
	@echo "Setting up $(VENV) with the development tools: a minute or two"
	$(PYTHON) -m venv $(VENV)
	@# Compiled is what the checks import, by them: a quarter of it, and on all cores.
	$(BIN)/pip install --no-compile --quiet --require-hashes --no-deps --requirement requirements-dev.txt
	$(BIN)/pip install --no-compile --quiet --constraint constraints.txt --editable '.[search,rllib,dev]'
	@touch $(VENV)/.installed $@

# PyTorch is left out, and with it the CUDA packages of its larger build. The second file has what the first lacks.
CUDA := cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13 triton
DIGESTS := printf '%s\n' $(CUDA) | uv pip compile --quiet pyproject.toml --constraint constraints.txt --generate-hashes \
  --python-version 3.11 --no-annotate --no-header --excludes - --no-emit-package torch --extra search --extra rllib
# Of what boto3 needs, all but this is in requirements.txt; it asks for an older python-dateutil, and works with ours.
AWS := echo boto3==1.44.5
hashes:
	$(DIGESTS) --output-file requirements.txt
	$(DIGESTS) --extra dev --output-file requirements-dev.txt \
	  $$(sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/--no-emit-package \1/p' requirements.txt)
	sed -i '1i -r requirements.txt' requirements-dev.txt
	$(AWS) | uv pip compile --quiet - --generate-hashes --python-version 3.11 --no-annotate --no-header \
	  $(addprefix --no-emit-package ,python-dateutil six urllib3) --output-file requirements-aws.txt
	sed -i '1i # The files of these versions by their digests. Made by `make hashes`.' \
	  requirements.txt requirements-dev.txt requirements-aws.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
