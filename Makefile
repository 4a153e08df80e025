# The commands of development. `make help` lists the targets.
#
#   PYTHON=python3.12      the interpreter that the virtual environment is made from
#   VENV=path              where the virtual environment is, or goes; one that has torch >= 2.10 keeps its torch
#   TORCH=2.10.0           another torch than the pinned one
#   USE_SYSTEM=1           make no environment and install nothing: use $(PYTHON) as it is (a machine without a
#                          network, a container that has everything)
#   JOBS=4                 test processes
#   GPU_JOBS=12            test processes that share the GPU; default 1
#   E3NN=0.5.1             for test-e3nn-oldest: another e3nn than the oldest
#   EXAMPLES='demo tetris' for examples: which ones

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
USE_SYSTEM ?=
JOBS ?= 2
GPU_JOBS ?= 1
EXTRAS ?= test,bench,docs
READERS ?= pointcloud
KEPT := torch triton
# Bytecode is compiled when a module is first imported: most of what is installed never is.
INSTALL := $(VENV)/bin/python -m pip install --no-compile
CASES ?= *
CHECK ?=
SIZE ?= tiny
EXAMPLES ?= [a-z]*
OUTPUT ?= outputs

ifeq ($(USE_SYSTEM),)
  PY := $(abspath $(VENV))/bin/python
  READY := $(VENV)/.insum-ready
  # The demo needs a small part of what development needs; where everything is installed, nothing more.
  DEMO_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.insum-examples-ready)
else
  PY := $(PYTHON)
  READY :=
  DEMO_READY :=
endif

# The caller's PYTHONPATH is kept: with USE_SYSTEM=1 that may be where the packages are.
SEEN := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# One thread per process: the test processes share the cores, and sums keep their order.
TEST_ENV := OMP_NUM_THREADS=1 MPLBACKEND=Agg PYTHONPATH=$(SEEN)
RUN_ENV := MPLBACKEND=$${MPLBACKEND:-Agg} PYTHONPATH=$(SEEN)

.PHONY: help venv system-libs demo test test-e3nn-oldest peers doctest lint code-lines format types examples check gpu-check gpu-check-ranks sanitize sanitize-cpu bench bench-table docs docs-check constraints wheel wheel-check clean distclean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z0-9-]+):.*## */\1\t/' | expand -t 18

venv: $(READY) ## make .venv and install everything (a second call does nothing)

# Installed again where a stamp is older than what it depends on.
$(VENV)/.insum-examples-ready: EXTRAS := examples
$(VENV)/.insum-examples-ready: READERS :=
# The demo may be run in an environment that is used for other things: nothing in it is replaced but this package.
$(VENV)/.insum-examples-ready: KEPT :=
$(VENV)/.insum-ready $(VENV)/.insum-examples-ready: pyproject.toml constraints.txt
	@test -z "$(READERS)" || $(MAKE) --no-print-directory system-libs
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "insum_nn needs Python >= 3.11; this is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "could not make a virtual environment; on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@# torch first and by exact version: the package index chooses the build that fits the machine, and no later step changes it.
	@cp constraints.txt $(VENV)/constraints.txt
	@$(VENV)/bin/python -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))' 2>/dev/null \
	  && test -z "$(TORCH)" \
	  || $(INSTALL) $(if $(TORCH),torch==$(TORCH),-c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt))
	@# What is in KEPT, or all that is installed, keeps its version: where torch is not the pinned one, the other packages must
	@# fit it and the Triton that came with it.
	@$(VENV)/bin/python -c 'import importlib.metadata as m, sys; print("\n".join(f"{d.name}=={d.version.split(chr(43))[0]}" for d in m.distributions() if d.name in sys.argv[1:] or len(sys.argv) == 1))' $(KEPT) \
	  | while IFS='=' read -r name _ version; do sed -i "s/^$${name//[-_.]/[-_.]}==.*/$$name==$$version/I" $(VENV)/constraints.txt; done
	@# In this mode static tools, such as type checkers, find the package too.
	@# No Open3D wheel exists for some interpreters and processors; only the reader of PCD files needs it.
	install() { $(INSTALL) -c $(VENV)/constraints.txt --config-settings editable_mode=compat -e ".[$$1]"; }; \
	test -n "$(READERS)" && install '$(EXTRAS),$(READERS)' || { install '$(EXTRAS)'; test -z "$(READERS)" \
	  || echo "note: Open3D could not be installed; point clouds can still be read from text, PLY and KITTI files."; }
	@touch $@

# Open3D's wheel needs these libraries of the system; everything else works without them.
SYSTEM_LIBS := libusb-1.0.so.0:libusb-1.0-0 libGL.so.1:libgl1 libX11.so.6:libx11-6 libgomp.so.1:libgomp1

system-libs: ## install the system libraries that Open3D loads, where allowed
	@export PATH="$$PATH:/usr/sbin:/sbin" DEBIAN_FRONTEND=noninteractive; missing=""; known="$$(ldconfig -p 2>/dev/null || true)"; \
	for pair in $(SYSTEM_LIBS); do grep -qF "$${pair%%:*}" <<< "$$known" || missing="$$missing $${pair##*:}"; done; \
	test -n "$$missing" || exit 0; \
	as=""; test "$$(id -u)" = 0 || as="sudo -n"; \
	if command -v apt-get >/dev/null && { test -z "$$as" || sudo -n true 2>/dev/null; } \
	  && $$as apt-get update -qq && $$as apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	then echo "installed for Open3D:$$missing"; \
	else echo "note: Open3D needs the system packages$$missing, which could not be installed here; all else works without them."; fi

demo: $(DEMO_READY) ## train five small networks on our layers, compare each with its baseline, print one table
	@# One thread by default: on a busy machine threads that wait for each other take several times as long.
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN_ENV) $(PY) examples/demo.py --size tiny --out $(OUTPUT)/demo

test: $(READY) doctest ## run all CPU tests, and list the slowest twenty
	@# A process takes tests in their order until it has none left: what a module prepares is prepared once, by one process.
	@# A test that takes longer than any should is named, with the line where it is, and ends its process.
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist worksteal -m "not gpu" --durations 20 --durations-min 5 \
	  -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

# Another e3nn, by default the oldest that the extra allows, which MACE pins; all other packages are the environment's.
E3NN ?= $(shell sed -n 's/^e3nn = .*e3nn>=\([0-9.]*\).*/\1/p' pyproject.toml)
E3NN_FOLDER := $(abspath $(VENV))-e3nn-$(E3NN)
# Current torch warns about how it reads its constants and annotates its classes.
E3NN_ALLOWED := -W "ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD:UserWarning" \
  -W "ignore:The TorchScript type system doesn't support instance-level:UserWarning"

$(E3NN_FOLDER): | $(READY)
	@rm -rf $@.new
	$(PY) -m pip install -q --no-deps --target $@.new e3nn==$(E3NN)
	@mv $@.new $@

# C functions do not depend on e3nn: their tests run once, with the pinned one.
test-e3nn-oldest: $(READY) | $(E3NN_FOLDER) ## run the tests of tensor products with the oldest e3nn that they support, or with E3NN=0.5.1
	export $(TEST_ENV) PYTHONPATH=$(E3NN_FOLDER):$(SEEN) TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1; \
	$(PY) -W ignore -c 'import e3nn; assert e3nn.__version__ == "$(E3NN)", e3nn.__file__'; \
	$(PY) -m pytest -q -n $(JOBS) -m "not gpu and not c" $(E3NN_ALLOWED) tests/layers/test_swap.py tests/layers/equivariant \
	  tests/models/test_nequip.py tests/models/test_tetris.py tests/structure/test_clebsch_gordan.py

peers: $(READY) ## run the baselines' own tests that the package index has, on our classes
	$(TEST_ENV) $(PY) tests/peers/run_from_index.py --folder $(abspath $(VENV))-peers

# Collected separately: with --doctest-modules, pytest would import the tests' modules twice. What only nequip imports
# has no examples.
doctest: $(READY) ## run the examples of the docstrings
	$(TEST_ENV) $(PY) -m pytest -q -n $(JOBS) --doctest-modules insum_nn \
	  --ignore insum_nn/layers/equivariant/nequip_extension.py

lint: $(READY) ## style and changelog
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@grep -qE '^## \[(Unreleased|[0-9]+\.[0-9]+\.[0-9]+)\]' CHANGELOG.md || { echo "CHANGELOG.md has no entry" >&2; exit 1; }

code-lines: $(READY) ## print how many lines of code each folder has, and how many it may have
	@PYTHONPATH=$(SEEN) $(PY) -m tests.code_lines

format: $(READY) ## rewrite the files in the project's style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(READY) ## check the types
	$(PY) -m pyright --pythonpath "$$($(PY) -c 'import sys; print(sys.executable)')"

# Run in OUTPUT, so that what an example writes stays there.
examples: $(READY) ## run every example at its tiny size, or at the full one: make examples SIZE=full
	@mkdir -p $(OUTPUT); count=0; \
	for file in $(abspath $(foreach name,$(EXAMPLES),$(wildcard examples/$(name).py))); do \
	  echo "== $$(basename $$file) --size $(SIZE)"; \
	  (cd $(OUTPUT) && $(RUN_ENV) $(PY) $$file --size $(SIZE)) || { echo "$$file failed" >&2; exit 1; }; \
	  count=$$((count + 1)); \
	done; \
	test $$count -gt 0 || { echo "no example ran" >&2; exit 1; }; echo "$$count examples ran"

check: lint types test ## lint, types and tests

gpu-check: $(READY) ## run the tests that need a GPU; none run, or any skipped, is a failure
	@# -v: a run that is interrupted has printed what failed.
	INSUM_REQUIRE_GPU=1 MPLBACKEND=Agg PYTHONPATH=$(SEEN) $(PY) -m pytest -m gpu -v -rf $(if $(filter-out 1,$(GPU_JOBS)),-n $(GPU_JOBS) --dist worksteal)

gpu-check-ranks: $(READY) ## run the tests of two processes that need two GPUs; none run, or any skipped, is a failure
	INSUM_REQUIRE_GPU=1 MPLBACKEND=Agg PYTHONPATH=$(SEEN) $(PY) -m pytest -m two_gpus -v -rf

sanitize: $(READY) ## run generated kernels of every kind under compute-sanitizer; needs a GPU and the CUDA toolkit
	$(RUN_ENV) $(PY) -m tests.compiler.sweep memcheck racecheck

sanitize-cpu: $(READY) ## run generated C of every kind under the address and undefined-behaviour sanitizers
	@# Two threads share what generated code writes, also where one is the rule for other checks.
	$(RUN_ENV) OMP_NUM_THREADS=2 $(PY) -m tests.compiler.sanitize_cpu

bench: $(READY) ## run benchmarks, keep the record, update benchmarks/results/current: make bench CASES='spmm*'
	$(RUN_ENV) $(PY) -m benchmarks.run '$(CASES)' --save --supervise

bench-table: $(READY) ## write the tables of README and docs, and the plots, from benchmarks/results: CHECK=1 only compares
	$(RUN_ENV) $(PY) -m benchmarks.tables $(if $(CHECK),--check)

wheel: $(READY) ## build wheel and source package into dist/, the wheel from the source package
	rm -rf dist
	$(PY) -m build --outdir dist

# A new environment that sees the packages of this one, but not this checkout: the wheel must bring all that it needs.
wheel-check: wheel ## install the wheel in a new environment and run README's blocks there
	@rm -rf $(OUTPUT)/wheel; mkdir -p $(OUTPUT)/wheel; $(PY) -m venv $(OUTPUT)/wheel
	@$(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$$($(OUTPUT)/wheel/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/packages.pth"
	$(OUTPUT)/wheel/bin/python -m pip install -q --no-deps --no-index --ignore-installed dist/*.whl
	$(abspath $(OUTPUT))/wheel/bin/python tests/markdown_blocks.py --installed-in $(abspath $(OUTPUT))/wheel README.md

# The theme's makers announce a release of mkdocs that it will not support; that is no matter of ours.
MKDOCS := NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHONPATH=$(SEEN) $(PY) -m mkdocs build -q --strict

docs: $(READY) ## build the site into site/, its tutorials executed at full size (minutes)
	INSUM_TUTORIALS=full $(MKDOCS)

docs-check: $(READY) ## build the site with the tutorials at a tiny size, warnings as errors
	INSUM_TUTORIALS=tiny $(MKDOCS) --site-dir $(OUTPUT)/site

# Only for the pinned torch; keeps the heading and the Triton that torch's GPU builds ask for.
constraints: $(READY) ## write the installed versions to constraints.txt
	@{ grep '^#' constraints.txt; $(PY) -m pip freeze --exclude-editable | grep -viE '^(-e|insum|triton==)|@' ; grep '^triton==' constraints.txt; } \
	  | sed -E 's/\+[a-z0-9.]+$$//' > constraints.new
	@{ grep '^#' constraints.new; grep -v '^#' constraints.new | LC_ALL=C sort -f; } > constraints.txt; rm constraints.new

clean: ## remove what was built, except the environment
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis outputs site
	find . -name __pycache__ -not -path './.git/*' -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	rm -rf .venv .venv-*
