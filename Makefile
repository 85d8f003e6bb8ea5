# Two commands: `make demo` and `make test`. Each sets up .venv first, once, with what it needs.
#
# PYTHON=...  an interpreter to use as it stands, with what is installed there; nothing is set up
# CUDA=...    cuda12x (default) or cuda13x: the CUDA of CuPy, NVRTC and the headers
# JOBS=...    processes for pytest (default 2)
# SHARD=1/4   of `make test-all` or `make test-gpu` one part of four, for four machines
# STALE=1     of `make test-gpu` what tests/gpu_report.json does not hold for
# BASE=...    what `make test` compares this tree with: by default main; HEAD for the quick tests of a commit alone

# Bytecode is kept, also where the shell says otherwise: some hundred processes would compile PyTorch's Python anew.
export PYTHONDONTWRITEBYTECODE :=

CUDA ?= cuda12x
JOBS ?= 2
GPU_JOBS ?= 8

ifdef PYTHON
PY := $(PYTHON)
SETUP :=
DEMO_SETUP :=
else
PY := .venv/bin/python
SETUP := .venv/.installed-$(CUDA)
DEMO_SETUP := .venv/.demo-$(CUDA)
endif

CUDA_FILES = $(shell find cuda_src -name '*.cu' -o -name '*.cuh')
CLANG_FORMAT = $(PY) -c "import clang_format; clang_format.clang_format()"
QUICK = --quick $(addprefix --base=,$(BASE))
# A test that takes ten minutes hangs: the process that runs it ends with the stacks of its threads, and the test has failed.
LIMIT = -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
ONE = OMP_NUM_THREADS=1 $(PY) -m pytest -q $(LIMIT)
PYTEST = $(ONE) -n $(JOBS) --dist worksteal
OPDB = tests/opdb -o cache_dir=.pytest_cache/opdb
FAILED = --last-failed --last-failed-no-failures none $(QUICK) # which ends with 5 where no test has failed
# -p finds the plugin in tests/support; python -m pytest finds the package in this folder
GPU_PYTEST = PYTHONPATH=tests/support$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -m pytest -m gpu -p gpu_report_plugin --gpu-report tests/gpu_report.json $(if $(STALE),--stale)

.PHONY: help demo test test-all setup lint types format pytest opdb again pytest-all opdb-all docs docs-check conformance test-gpu gpu-report bench soak sanitize test-matrix clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST)

demo: $(DEMO_SETUP) ## Train two small models; with no GPU also run their kernels in the simulator
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  $(PY) examples/add_model.py && $(PY) examples/mnist_cnn.py && \
	  echo "Done: both models were trained on the GPU by the kernels of cuda_src/."; \
	else \
	  $(PY) examples/add_model.py --simulate 3 && $(PY) examples/mnist_cnn.py --simulate 3 && \
	  echo "Done: both models were trained on the CPU by the operators' references, which are PyTorch, and then for three" && \
	  echo "steps by the kernels of cuda_src/ in the simulator, with the same results. On a GPU the kernels train them." && \
	  echo "Every kernel, for every architecture, is compiled by: $(PY) -m cupyops compile"; \
	fi

test: ## Lint, types, every quick test, and the slow tests of the files that differ from main, or from BASE
	$(call parts,pytest lint types opdb)

test-all: ## Everything that needs no GPU: every instance of every kernel, compiled and run; SHARD=1/4 for a part
	$(call parts,pytest-all lint types opdb-all)

# Two parts at a time, all of them even where one fails.
define parts
@rm -rf build/parts && mkdir -p build/parts
@$(MAKE) --no-print-directory part-setup
@$(MAKE) --no-print-directory --keep-going --jobs 2 $(addprefix part-,$(1)); status=$$?; \
  cat build/parts/*.part; exit $$status
endef

part-%:
	@start=$$(date +%s); $(MAKE) --no-print-directory $*; status=$$?; \
	  echo "$*: $$(($$(date +%s) - start)) s, $$([ $$status = 0 ] && echo passed || echo failed)" > build/parts/$*.part; \
	  exit $$status

setup: $(SETUP)

lint: $(SETUP) ## Check format and lint, Python and CUDA
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run --Werror $(CUDA_FILES)

types: $(SETUP) ## Check types
	$(PY) -m mypy

pytest: $(SETUP) ## Run the quick tests, JOBS at a time, and the slow ones of what differs from main
	$(PYTEST) $(QUICK)

opdb: $(SETUP) ## Run PyTorch's own databases of samples (op_db, module_db, optim_db), in a process of its own
	$(ONE) $(OPDB) $(QUICK)

again: $(SETUP) ## Run the quick tests that failed last once more, one after another
	$(ONE) $(FAILED) || [ $$? = 5 ]
	$(ONE) $(OPDB) $(FAILED) || [ $$? = 5 ]

pytest-all: $(SETUP) ## Run all tests, JOBS at a time, and write which were slow into build/slow.csv
	@mkdir -p build
	$(PYTEST) --measure=build/slow.csv $(addprefix --shard=,$(SHARD))

opdb-all: $(SETUP) ## Run all of PyTorch's op_db, module_db and optim_db
	$(PYTEST) tests/opdb $(addprefix --shard=,$(SHARD))

docs: $(SETUP) ## Build the site of documentation into build/site; a broken link is an error
	$(PY) tools/docs_site.py
	$(PY) -m zensical build --clean --strict -f build/mkdocs.yml

docs-check: docs ## Look at every page of the site in a headless Chromium: links, widths, console, search; SHOTS=folder for pictures
	$(PY) tools/docs_check.py $(addprefix --shots=,$(SHOTS))

conformance: $(SETUP) ## All of op_db, module_db and optim_db, and write what passed into docs/conformance.md
	$(PYTEST) tests/opdb --conformance=tests/conformance.csv
	$(PY) tools/conformance.py

format: $(SETUP) ## Format Python and CUDA in place
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	@$(CLANG_FORMAT) -i $(CUDA_FILES)

test-gpu: $(SETUP) ## Run the GPU tests, SHARD=1/4 of all but the largest, or with STALE=1 those for which tests/gpu_report.json does not hold
	$(GPU_PYTEST) -k more_than_2 tests; status=$$?; $(GPU_PYTEST) -k "not more_than_2" -n $(GPU_JOBS) --dist worksteal $(addprefix --shard=,$(SHARD)) tests || status=1; \
	  $(GPU_PYTEST) -n $(GPU_JOBS) --dist worksteal tests/opdb $(if $(STALE),,--conformance=tests/conformance_gpu.csv) || status=1; \
	  $(PY) tools/conformance.py && exit $$status

gpu-report: ## Say for which operators and folders the GPU runs of tests/gpu_report.json hold
	@$(or $(PYTHON),python3) tools/gpu_report.py

bench: $(SETUP) ## Measure beside PyTorch, torch.compile and Liger on this machine's GPU; OP=layer_norm for one
	$(PY) -m cupyops bench $(OP)

soak: $(SETUP) ## Random calls on this machine's GPU for ten minutes, in threads and on streams: no wrong bit, no leak
	$(PY) tools/soak.py --minutes 10

sanitize: $(SETUP) ## compute-sanitizer over every kernel, on this machine's GPU
	$(PY) tools/sanitize.py --json build/sanitize.json

test-matrix: $(SETUP) ## What works with each Python that is here, in new environments; writes tests/matrix.csv
	$(PY) -m pip install --quiet uv
	$(PY) tools/matrix.py

clean: ## Remove what was built; .venv and the user's kernel cache stay
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/.demo-$(CUDA): EXTRAS := $(CUDA),examples
.venv/.installed-$(CUDA): EXTRAS := $(CUDA),cli,docs,examples,test,dev
# Without a GPU, PyTorch's CPU build, which is 5 GB less.
CPU_INDEX := https://download.pytorch.org/whl/cpu
CPU_TORCH := .venv/bin/python -m pip install --quiet --no-compile --no-deps --retries 0 -c constraints.txt torch --index-url $(CPU_INDEX)
# What is imported is compiled to bytecode at its first import: all of it would double the time of the installation.
.venv/.demo-$(CUDA) .venv/.installed-$(CUDA): pyproject.toml constraints.txt
	@python3 -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "cupyops needs Python 3.11 or later; python3 is $$(python3 -V)"; exit 1; }
	test -x .venv/bin/python || python3 -m venv .venv
	@# the pip that comes with an older Python takes twice as long
	@.venv/bin/python -m pip install --quiet --upgrade 'pip>=25' || true
	@command -v nvidia-smi >/dev/null 2>&1 || $(CPU_TORCH) || echo "$(CPU_INDEX) cannot be reached: pip takes PyTorch from its own index"
	.venv/bin/python -m pip install --quiet --no-compile -c constraints.txt -e ".[$(EXTRAS)]"
	@touch .venv/.demo-$(CUDA) $@
