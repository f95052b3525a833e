# TopoEP-Titan. Bare `make` lists the targets. Everything installs itself into $(VENV), once.
VENV   ?= .venv
PYTHON ?= python3
RECIPE ?= toml_configs/qwen3_debug.toml
NPROC  ?=
NAME   ?= $(basename $(notdir $(RECIPE)))
ARGS   ?=
STEPS  ?= 100
PLANNERS ?= none topoep joint
DEMO   ?= outputs/data/demo
CORPUS ?= toml_configs/data/corpus.toml

BIN   := $(VENV)/bin
PROCESSES := $(if $(NPROC),--nproc $(NPROC))
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 20
	@echo; echo "Variables: NPROC RECIPE NAME ARGS STEPS PLANNERS VENV, e.g."
	@echo "  make train RECIPE=toml_configs/qwen3_debug.toml NAME=mine ARGS='--training.steps 20'"

install: $(STAMP)  ## create $(VENV) and install everything into it
$(STAMP): pyproject.toml $(wildcard kernels/CMakeLists.txt kernels/csrc/*/* kernels/cuda/* kernels/include/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

test: $(STAMP)     ## lint and run the whole test suite
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest

lint: $(STAMP)     ## ruff: linter and formatter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo-data: $(DEMO)/manifest.json  ## build the demo corpus (real text, downloaded once)
$(DEMO)/manifest.json: $(STAMP) toml_configs/data/demo.toml
	$(BIN)/python -m data.prepare toml_configs/data/demo.toml --out $(DEMO)
	touch $@

data: $(STAMP)     ## build the six-source corpus CORPUS (from the hub, or its mirrors)
	$(BIN)/python -m data.prepare $(CORPUS) --out outputs/data/$(basename $(notdir $(CORPUS)))

bench-data: $(STAMP)  ## measure the data pipeline, as ratios to a reference on this machine
	$(BIN)/python -m data.bench --json outputs/bench-data.json

train: $(STAMP)    ## check RECIPE, then train it (NPROC processes, or the recipe's) into outputs/NAME
	$(BIN)/python train.py $(RECIPE) $(PROCESSES) --name $(NAME) $(ARGS)

reproduce-glm: demo-data  ## train GLM-4.5 MoE under each of PLANNERS and write the report
	$(BIN)/python -m recipes.reproduce toml_configs/glm4_moe_debug.toml --name reproduce-glm \
	  $(PROCESSES) --steps $(STEPS) --planners $(PLANNERS)

reproduce-deepseek: demo-data  ## train DeepSeek-V2 under each of PLANNERS and write the report
	$(BIN)/python -m recipes.reproduce toml_configs/deepseek_v2_debug.toml --name reproduce-deepseek \
	  $(PROCESSES) --steps $(STEPS) --planners $(PLANNERS)

reproduce-qwen: demo-data  ## train Qwen3 under each of PLANNERS and write the report
	$(BIN)/python -m recipes.reproduce toml_configs/qwen3_debug.toml --name reproduce-qwen \
	  $(PROCESSES) --steps $(STEPS) --planners $(PLANNERS)

bench-planner: $(STAMP)  ## quality and planning time of every planner, as a table
	$(BIN)/topoep bench-planner $(ARGS)

bench-exec: $(STAMP)  ## speed-ups of planners and dispatchers on an emulated cluster (root only)
	$(BIN)/python -m recipes.bench_exec $(ARGS)

bench-kernels: $(STAMP)  ## native row kernels against PyTorch expressions, as ratios
	$(BIN)/python kernels/bench/rows.py $(ARGS)

# The GPU kernels in the SIMT machine, and the native ones, under address and undefined-behaviour
# sanitizers; leaks are Python's own.
SANITIZED := tests/kernels/test_simt.py tests/kernels/test_row_kernels.py \
  tests/kernels/test_transfers.py tests/planning/test_device_planners.py
test-sanitize: $(STAMP)  ## kernel tests under ASan and UBSan
	PATH=$(abspath $(BIN)):$$PATH cmake -S kernels -B build/sanitize -DTOPOEP_SANITIZE=ON
	cmake --build build/sanitize
	TOPOEP_KERNELS_LIB=build/sanitize ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -k "not opcheck" $(SANITIZED)

test-gpu: $(STAMP)  ## parity of every kernel on a GPU; racecheck and memcheck on small cases
	$(BIN)/python -m pytest -m gpu
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; exit 1; }
	for tool in racecheck memcheck; do compute-sanitizer --tool $$tool --error-exitcode 1 \
	  $(BIN)/python -m pytest -m gpu -k small || exit 1; done

bench-gpu: $(STAMP)  ## planner latency, row kernels and transfers on a GPU
	$(BIN)/python kernels/bench/gpu.py $(ARGS)

figures: $(STAMP)  ## the papers' figures and tables beside ours, as outputs/figures/report.html
	$(BIN)/python -m recipes.figures $(ARGS)

tensorboard: $(STAMP)  ## show all runs in outputs/
	$(BIN)/tensorboard --logdir outputs

clean:           ## remove built files (outputs/ and $(VENV) stay)
	rm -rf build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: help install test lint demo-data data bench-data train reproduce-qwen reproduce-glm figures
.PHONY: reproduce-deepseek bench-planner bench-exec bench-kernels test-sanitize test-gpu bench-gpu
.PHONY: tensorboard clean
.DEFAULT_GOAL := help
