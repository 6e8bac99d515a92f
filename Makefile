# Everything is set up on demand: `make run` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Your own settings, where there are any: the pipeline that they compile to runs here and on the platform.
SETTINGS := $(firstword $(wildcard settings/vertex.toml) settings/local.toml)
PIPELINE := compiled/retrain.yaml
# Processes that share the tests, a file to each at a time; JOBS=0 runs them in one, as a debugger wants it.
JOBS ?= 2
# $(call install,EXTRA): pip prints errors only.
install = @begin=$$(date +%s); $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
  -e '.[$(1)]' && echo "... installed in $$(($$(date +%s) - begin)) s"
# Ray and Beam are no dependencies, and Beam asks for other releases: their environment sees .venv, which does not see it.
ENGINES := $(CURDIR)/$(VENV)/engines
PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'
MLFLOW := $(CURDIR)/$(VENV)/mlflow
export SHARDLINE_TEST_MLFLOW ?= $(if $(wildcard $(MLFLOW)/.done),$(MLFLOW)/bin/mlflow)
export SHARDLINE_TEST_ENGINES ?= $(if $(wildcard $(ENGINES)/.done),$(ENGINES)/bin/python)
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Whatever was set on the command line (make run source=tfds:mnist epochs=3), but for make's own variables.
PARAMS := $(filter-out PYTHON VENV JOBS PYTEST_ARGS SETTINGS IMAGE EXTRA REVISION DOCKER,$(foreach v,$(.VARIABLES),$(if $(filter command line,$(origin $(v))),$(v))))

# The image of the settings, without a digest; with CUDA where a machine has GPUs.
IMAGE = $(shell sed -nE 's/^image = "([^"@]+).*/\1/p' $(SETTINGS))
EXTRA = $(if $(shell grep -E '^accelerator_type = "[^"]' $(SETTINGS)),gpu,image)
REVISION = $(shell git describe --always --dirty --abbrev=40 2>/dev/null)
DOCKER = docker

# Hundreds of processes import the same modules: where they may not keep the bytecode, each compiles them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-all test-quick engines lint compile image push cloud-image docs audit clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(BIN)/.run $(PIPELINE)  ## Run the compiled pipeline here; NAME=VALUE sets its parameters
	@$(BIN)/shardline run $(PIPELINE) $(foreach p,$(PARAMS),--param '$(p)=$(subst ','\'',$($(p)))')

test: $(BIN)/.test  ## Run the tests: every behaviour once; PYTEST_ARGS="tests/unit -k label" for some
	$(PYTEST) -m 'not matrix and not engine' $(PYTEST_ARGS)

test-all: $(BIN)/.test  ## Run all tests: long matrices, and those with a real Slurm, Ray, Beam and MLflow
	$(PYTEST) $(PYTEST_ARGS)

test-quick: $(BIN)/.test  ## Run the tests that need no TensorFlow, in about a minute
	$(PYTEST) --quick tests/unit tests/compile $(PYTEST_ARGS)

engines: $(ENGINES)/.done $(MLFLOW)/.done  ## Install Ray, Beam and MLflow, whose tests are skipped without them

lint: $(BIN)/.test  ## Format check, lint, types, import rules, drift of the compiled pipeline
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shardline compile --settings $(SETTINGS) --check

compile: $(BIN)/.run  ## Compile the pipeline
	$(BIN)/shardline compile --settings $(SETTINGS) --output $(PIPELINE)

image:  ## Build the image of the settings; DOCKER=podman, EXTRA=gpu
	$(DOCKER) build --platform linux/amd64 --build-arg EXTRA=$(EXTRA) --build-arg REVISION=$(REVISION) --tag $(IMAGE) .

push:  ## Push it; the digest that is printed pins it in the settings: NAME@sha256:...
	$(DOCKER) push $(IMAGE)

cloud-image:  ## Build and push it on Cloud Build, without docker
	gcloud builds submit --config cloudbuild.yaml --ignore-file .dockerignore \
	  --substitutions _IMAGE=$(IMAGE),_EXTRA=$(EXTRA),_REVISION=$(REVISION)

docs: $(BIN)/.docs  ## Build the documentation as a site in build/docs; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -d build/docs.cache docs build/docs
	@echo "build/docs/index.html"

audit: $(BIN)/.test  ## Ask for known vulnerabilities of the releases in constraints.txt; needs the internet
	$(BIN)/uv tool run --quiet pip-audit==2.10.1 --strict --disable-pip --no-deps -r constraints.txt

clean:  ## Remove the virtual environment and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

$(PIPELINE):
	$(BIN)/shardline compile --settings $(SETTINGS) --output $(PIPELINE)

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "Shardline needs Python 3.11 or 3.12; try: make PYTHON=python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

$(BIN)/.run: $(VENV)/pyvenv.cfg setup.cfg constraints.txt
	@echo "Installing TensorFlow, KFP and what they need into $(VENV) (once: 1 GB to download, 3 GB on disk)"
	$(call install,local)
	@touch $@

$(BIN)/.test: $(BIN)/.run
	@echo "Installing what the tests need into $(VENV)"
	$(call install,dev)
	@touch $@

$(ENGINES)/.done: $(BIN)/.test
	@echo "Installing Ray and Beam into $(ENGINES) (once: 0.7 GB on disk)"
	@$(PYTHON) -m venv $(ENGINES)
	@printf "import site; site.addsitedir('%s')\n" "$$($(BIN)/python -c $(PURELIB))" \
	  > "$$($(ENGINES)/bin/python -c $(PURELIB))/shardline.pth"
	@begin=$$(date +%s); $(ENGINES)/bin/python -m pip install -qq --disable-pip-version-check \
	  'ray[train]>=2.60,<2.61' 'apache-beam>=2.77,<2.78' && echo "... installed in $$(($$(date +%s) - begin)) s"
	@touch $@

# The server, with its own environment, as anybody runs it.
$(MLFLOW)/.done: $(VENV)/pyvenv.cfg
	@echo "Installing the MLflow server into $(MLFLOW) (once: 0.9 GB on disk)"
	@$(PYTHON) -m venv $(MLFLOW)
	@begin=$$(date +%s); $(MLFLOW)/bin/python -m pip install -qq --disable-pip-version-check 'mlflow>=3.17,<3.18' \
	  && echo "... installed in $$(($$(date +%s) - begin)) s"
	@touch $@

$(BIN)/.docs: $(VENV)/pyvenv.cfg setup.cfg constraints.txt
	@echo "Installing Sphinx into $(VENV)"
	$(call install,docs)
	@touch $@
