# Every target sets up what it needs in .venv; a machine with Python >= 3.11 and git is enough.
PYTHON ?= python3
BIN := .venv/bin
# Real images and weights for `make proof`, by default in a folder beside the checkout.
HAM10000 ?= ../shared/data/ham10000_200x150.tar.gz
WEIGHTS ?= ../shared/weights/resnet18_imagenet1k_v1_fp16.safetensors

.PHONY: demo tutorial-pictures messages test test-all lint proof proof-cluster bench clean

demo: .venv/ready  ## four methods on synthetic images, and their report
	$(BIN)/medcil demo --out demo

tutorial-pictures: .venv/ready  ## the pictures of docs/get-started/tutorial.md; needs Chromium
	rm -rf build/tutorial
	OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH" examples/folder_workflow.sh build/tutorial
	$(BIN)/python examples/tutorial_pictures.py build/tutorial docs/images/tutorial

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --durations=25

messages: .venv/ready  ## tests/errors/messages.txt: the messages of all errors, by code
	$(BIN)/python tests/errors/test_messages.py

test: lint  ## what a change can break in a day's work
	$(PYTEST) -m "not slow" --dist worksteal $(MEASURE)

test-all: MEASURE := --cov --cov-report=
test-all: test  ## and the kills, the clusters, the browser, the stories on real images; coverage of both
	$(PYTEST) -m slow --dist loadfile --cov --cov-append --cov-report=term:skip-covered --cov-fail-under=90

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

proof: .venv/ready  ## half an hour on two cores: the comparison on the real HAM10000
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python proofs/ham10000_forgetting.py --root $(HAM10000) --weights $(WEIGHTS) --out build/proof

proof-cluster: .venv/ready  ## some minutes on two cores: thirty runs on a Ray cluster of two nodes, one of which is lost
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python proofs/ray_cluster.py --out build/proof-cluster

bench: .venv/ready  ## training speed, what of it this machine can measure: build/bench/speed.md
	mkdir -p build/bench
	for name in step terms cpu growth; do \
	  OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/$$name.py --out build/bench/$$name.json || exit 1; done
	for name in whole_run together; do OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/$$name.py \
	  --root $(HAM10000) $(addprefix --weights ,$(wildcard $(WEIGHTS))) --out build/bench/$$name.json || exit 1; done
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/streaming.py \
	  $(addprefix --root ,$(wildcard $(HAM10000))) --out build/bench/streaming.json
	$(BIN)/python benchmarks/show.py build/bench/*.json > build/bench/speed.md

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "medcil needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode \
	  --editable '.[all,dev]' --constraints constraints.txt
	touch $@

clean:
	rm -rf .venv build demo
