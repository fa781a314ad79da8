# Everything from nothing: `make demo` and `make test` need Python >= 3.10 (with venv), make and a C++ compiler.
#
#   make demo       split a pretrained model over two processes and compare with the unsplit one   ARGS="--dtype bf16"
#   make test       the whole test suite                                                  ARGS="-k all_reduce -x"
#   make test-gpu   what needs a CUDA device: tests, timings, one JSON         VENV=<environment with a CUDA torch>
#   make bench      every benchmark into benchmarks/results, and the README's tables from them    ARGS=--quick
#   make lint       ruff, clang-format, mypy
#   make models     check the Promela models of the signal protocol (needs spin)
#   make emu        the CUDA kernels on CPU threads, plain and under ThreadSanitizer
#   make sass       compile the CUDA kernels to machine code (needs nvcc, not a GPU)
#   make soak       random operations and faults, again and again                           ROUNDS=10
#   make clean      remove what was built; `make distclean` removes the virtual environment too

PYTHON ?= python3
# Made when it is not there; may be an environment of your own, in which only what is missing is installed.
VENV ?= .venv
# Installed only when the environment has no torch.
TORCH ?= torch==2.13.0
ARGS ?=
ROUNDS ?= 10

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-gpu bench lint format models emu emu-programs sass soak tools install clean distclean

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check
stamps := $(VENV)/stamps
native_sources := $(shell find csrc cmake -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml \
                  $(wildcard build_backend/*.py)
cmake = PATH="$(abspath $(VENV))/bin:$$PATH" cmake
configure = $(cmake) -S . -G Ninja -DPython_EXECUTABLE=$(abspath $(python))

demo: $(stamps)/demo
	$(VENV)/bin/interlace demo $(ARGS)

# Tests that mostly compile (kernels, emulator, models of the protocol) run beside the others, on what these leave idle of
# the cores; their output comes at the end. With ARGS everything is one run.
beside := tests/device tests/models
test: $(stamps)/test $(stamps)/demo
ifeq ($(strip $(ARGS)),)
	@mkdir -p build; \
	nice -n 19 $(python) -m pytest $(beside) >build/tests-beside.log 2>&1 & beside=$$!; \
	trap 'kill $$beside 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	status=0; $(python) -m pytest $(beside:%=--ignore=%) || status=$$?; \
	wait $$beside || status=$$?; \
	cat build/tests-beside.log; exit $$status
else
	$(python) -m pytest $(ARGS)
endif

test-gpu: $(stamps)/test
	@$(python) -c "import sys, torch; torch.cuda.is_available() or sys.exit('test-gpu: torch ' + torch.__version__ + ' sees no CUDA device; with a GPU: make test-gpu VENV=<an environment with a CUDA torch>, or VENV=.venv-gpu TORCH=torch')"
	$(python) -m tests.device.gpu.suite $(ARGS)

bench: $(stamps)/native
	$(VENV)/bin/interlace bench all --out benchmarks/results $(ARGS)
	$(VENV)/bin/interlace bench readme

soak: $(stamps)/test
	for round in $$(seq $(ROUNDS)); do $(python) -m pytest -q tests/faults $(ARGS) || exit 1; done

models:
	$(PYTHON) csrc/models/check.py $(ARGS)

lint: $(stamps)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.cu' 'csrc/*.hpp' 'csrc/*.inl' | xargs -r $(VENV)/bin/clang-format --dry-run -Werror
	$(VENV)/bin/mypy

format: $(stamps)/dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.cu' 'csrc/*.hpp' 'csrc/*.inl' | xargs -r $(VENV)/bin/clang-format -i

emu: emu-programs
	PATH="$(abspath $(VENV))/bin:$$PATH" ctest --test-dir build/emu --output-on-failure --parallel $$(nproc)

emu-programs: $(stamps)/tools
	$(configure) -B build/emu -DINTERLACE_CUDA=OFF -DINTERLACE_EMU_TESTS=ON
	$(cmake) --build build/emu --target interlace_emu_tests

sass: $(stamps)/tools
	$(configure) -B build/sass
	$(cmake) --build build/sass --target interlace_sass

install: $(stamps)/native

tools: $(stamps)/tools

$(python):
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# A torch that is there stays as it is, whatever its version; the build says so if it is too old.
$(stamps)/torch: | $(python)
	@mkdir -p $(stamps)
	$(python) -c "import torch" 2>/dev/null || $(pip) install $(TORCH)
	@touch $@

# The build tools go into the environment, so that a rebuild does not fetch them into an isolated one each time.
$(stamps)/tools: $(stamps)/torch pyproject.toml
	$(pip) install --quiet "setuptools>=77" "cmake>=3.25" ninja "pybind11>=2.13"
	@touch $@

$(stamps)/native: $(stamps)/tools $(native_sources)
	$(pip) install --no-build-isolation --editable .
	@touch $@

# interlace itself is installed by now: these add what the extra of that name lists.
$(stamps)/demo $(stamps)/test $(stamps)/dev: $(stamps)/%: pyproject.toml | $(stamps)/native
	$(pip) install --quiet "interlace[$*]"
	@touch $@

clean:
	rm -rf build dist python/interlace.egg-info python/interlace/*.so python/interlace/build_info.json
	rm -rf $(stamps)/native .pytest_cache .ruff_cache .mypy_cache

distclean: clean
	rm -rf $(VENV)
