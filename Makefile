# `make help` says what there is. Everything happens in .venv and build/; git sees neither.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(patsubst torch==%,%,$(filter torch==%,$(file < requirements-dev.txt)))
TORCH_REQUIREMENT := torch$(if $(filter-out newest,$(firstword $(TORCH))),==$(firstword $(TORCH)))
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
SITE := build/site

ifdef NO_VENV
# An interpreter that already has torch, ninja and pytest: nothing is installed, the package is used from this folder.
BIN :=
PY := $(PYTHON)
READY := build
WORKERS ?=
export PYTHONPATH := $(CURDIR)
else
BIN := $(VENV)/bin/
PY := $(BIN)python
REQUIREMENTS := $(VENV)/.requirements.stamp
READY := $(VENV)/.editable.stamp
WORKERS ?= auto
endif
PYTEST_WORKERS := $(if $(WORKERS),-n $(WORKERS) --dist loadgroup)
# What is tested with the newest torch: what of PyTorch's own this library touches.
NEWEST_TESTS := surface sdpa torch_integration

CPP_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help demo demo-large test test-newest test-installed test-transformers bench docs wheel wheels test-wheels test-wheel test-aarch64 test-cross hub test-hub build install lint \
  format types layering clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       set up .venv, build, train a small GPT on real text with our attention and with PyTorch's"
	@echo "make demo-large the same with 92M parameters at context 8192: tokens/s  (needs a GPU; DEMO_ARGS='--compile')"
	@echo "make test       set up .venv, build, run the whole test suite      (PYTEST_ARGS='-k causal -x')"
	@echo "make test-newest  tests what touches PyTorch's own on the newest torch, in build/venv-newest"
	@echo "make test-transformers   tests/huggingface with the oldest and the newest transformers that is taken"
	@echo "make bench      set up .venv, build, time our attention            (BENCH_ARGS='--device cpu')"
	@echo "make docs       set up .venv, build, make the site of the documents in build/site/, check its links"
	@echo "make wheel      set up .venv, make dist/*.tar.gz, and dist/*.whl for this torch and Python"
	@echo "make wheels TORCH='2.11.0 newest'   a wheel in dist/ for these and this Python;  make test-wheels: test it"
	@echo "make test-aarch64  cross-compiles for aarch64, and runs that with qemu; gets 5 GB into build/aarch64"
	@echo "make test-cross  compiles GPU kernels of every folder for aarch64; both need a cross compiler, qemu and nvcc"
	@echo "make hub        the wheels of dist as a repository for Hugging Face's package kernels, in build/hub"
	@echo "make build      set up .venv, compile what changed into flash_attn_ext/"
	@echo "make lint       check formatting and style of C++ and Python;      make format: apply it"
	@echo "make types      check the types of the package with mypy"
	@echo "make layering   check the rules of CONTRIBUTING.md: who may include whom, how long a file may be"
	@echo "make clean      remove what was built;                             make distclean: and .venv"
	@echo
	@echo "PYTHON=python3.12   the interpreter that .venv is made with (3.10 or later)"
	@echo "VENV=/some/where    another place for the virtual environment"
	@echo "TORCH=2.15.0        another torch than requirements-dev.txt names (newest: the newest); give it a VENV of its own"
	@echo "NO_VENV=1           no virtual environment and no downloads: PYTHON itself has torch, ninja and pytest"
	@echo "WORKERS=4           processes of make test, instead of one for each core; WORKERS= : one, as NO_VENV=1 has it"
	@echo "MAX_JOBS=4          compilers at a time, instead of what cores and memory allow"
	@echo "FLASH_ATTN_EXT_CUDA=0|1, FLASH_ATTN_EXT_ARCHS='8.0;9.0a+PTX', CUDA_HOME=...   the CUDA part of the build"

# Waiting threads sleep instead of spinning: on cores that other work shares, spinning makes small steps several times
# slower. Timings (bench) are taken as users have them, with the default.
demo demo-large test test-installed test-wheel: export OMP_WAIT_POLICY ?= passive

demo: $(READY)
	$(PY) examples/train_gpt.py $(DEMO_ARGS)

demo-large: $(READY)
	$(PY) examples/train_gpt.py --large $(DEMO_ARGS)

test: $(READY)
	$(PY) -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-newest:
	$(MAKE) --no-print-directory test-installed VENV=build/venv-newest TORCH=newest FLASH_ATTN_EXT_CUDA=0

# Not built in place, where the extension for another torch lies: installed, and tested from where no sources are.
test-installed: $(REQUIREMENTS)
	@$(PY) -c 'import torch; print(f"torch {torch.__version__} in $(VENV)")'
	rm -rf build/lib.* build/bdist.* build/installed
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-index --no-deps \
	  --wheel-dir build/installed .
	$(PY) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall build/installed/*.whl
	cd build/installed && $(abspath $(PY)) -m pytest $(PYTEST_WORKERS) $(NEWEST_TESTS:%=$(CURDIR)/tests/%) $(PYTEST_ARGS)

# The oldest and the newest release that the integration takes, each in a folder that goes before what .venv has.
test-transformers: $(READY)
	for release in $$($(PY) -c "import flash_attn_ext.integrations.transformers as t; print(t.OLDEST, t.NEWEST)"); do \
	  $(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target build/transformers-$$release \
	    "transformers==$$release.*" && \
	  PYTHONPATH=$(CURDIR)/build/transformers-$$release:$(CURDIR) $(PY) -m pytest $(PYTEST_WORKERS) tests/huggingface \
	    $(PYTEST_ARGS) \
	    || exit; \
	done

bench: $(READY)
	$(PY) -m flash_attn_ext bench $(BENCH_ARGS)

# A fresh start each time: pages that Sphinx does not read again would hide their warnings.
docs: $(READY)
	rm -rf $(SITE)
	$(PY) -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -d build/site-cache -c docs/site . $(SITE)
	$(PY) docs/site/check_links.py $(SITE)
	@echo "$(SITE)/index.html"

# What setuptools left of an earlier wheel would come along, modules that are gone included.
wheel: $(READY)
	rm -rf build/lib.* build/bdist.*
	$(PY) -c "from build_support import backend; backend.build_sdist('dist')"
	$(PY) -m pip wheel --disable-pip-version-check --no-build-isolation --no-index --no-deps --wheel-dir dist .
	@ls dist

# Always run: ninja knows better than make what has to be compiled again, and takes no time when nothing has.
build: $(REQUIREMENTS)
	@$(PY) -m build_support

# One wheel for this Python with a glue for each torch of TORCH. A torch that .venv does not have is unpacked in
# build/torch, for its headers. `newest` there stays as it was unpacked.
wheels: $(REQUIREMENTS)
	rm -rf build/lib.* build/bdist.*
	$(PY) -m build_support.wheels $(TORCH)
	@ls -s --block-size=1k dist/*.whl

# That wheel in an environment of its own for each torch of TORCH: import and accuracy, without a compiler or any other
# program on the PATH; what replaces PyTorch's function; the Python of README.
test-wheels:
	for torch in $(TORCH); do \
	  $(MAKE) --no-print-directory test-wheel VENV=build/venv-wheel-$$torch TORCH=$$torch || exit; \
	done

# The wheels of dist as a repository that Hugging Face's package `kernels` loads from.
hub: $(REQUIREMENTS)
	$(PY) -m build_support.hub

# With that package, in a folder that goes before what .venv has.
test-hub: $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target build/kernels-package kernels==0.17.2
	PYTHONPATH=$(CURDIR)/build/kernels-package:$(CURDIR) $(PY) -m pytest tests/packaging/test_hub.py $(PYTEST_ARGS)

test-wheel: $(REQUIREMENTS)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall \
	  --find-links dist flash_attn_ext
	mkdir -p build/installed
	cd build/installed && env -i PATH=/nonexistent $(abspath $(PY)) -m flash_attn_ext info
	cd build/installed && env -i PATH=/nonexistent $(abspath $(PY)) -m flash_attn_ext verify --quick
	cd build/installed && $(abspath $(PY)) -m pytest $(PYTEST_WORKERS) $(CURDIR)/tests/sdpa \
	  $(CURDIR)/tests/packaging/test_recipes.py::test_python_of_readme_runs $(PYTEST_ARGS)

# With a cross compiler, qemu and nvcc, without which both targets fail. PyTorch and Python for aarch64 stay in
# build/aarch64.
test-aarch64: $(READY)
	$(PY) -m build_support.aarch64
	$(PY) -m pytest tests/packaging/test_aarch64.py -m 'cross or not cross' $(PYTEST_ARGS)

# GPU kernels for aarch64, without a download.
test-cross: $(READY)
	$(PY) -m build_support.aarch64 tools
	$(PY) -m pytest tests/packaging/test_aarch64.py -m cross $(PYTEST_ARGS)

install: $(READY)

$(VENV)/.editable.stamp: pyproject.toml setup.py $(REQUIREMENTS) | build
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.requirements.stamp: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, $(PYTHON) is " + \
	  sys.version.split()[0] + ". Run: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/$(TORCH_REQUIREMENT)/' requirements-dev.txt > $(VENV)/requirements.txt
	$(PY) -m pip install --disable-pip-version-check --progress-bar off -r $(VENV)/requirements.txt
	@touch $@

lint: $(REQUIREMENTS)
	$(BIN)clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)ruff check .
	$(BIN)ruff format --check .

format: $(REQUIREMENTS)
	$(BIN)clang-format -i $(CPP_FILES)
	$(BIN)ruff check --fix .
	$(BIN)ruff format .

types: $(REQUIREMENTS)
	$(PY) -m mypy

layering:
	$(PYTHON) tests/architecture/rules.py

clean:
	rm -rf build dist demo *.egg-info .pytest_cache .ruff_cache .hypothesis
	find flash_attn_ext build_support tests examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f flash_attn_ext/*.so $(VENV)/.editable.stamp

distclean: clean
	rm -rf $(VENV)
