# The front door: `make help` lists what there is. Nothing here needs root but `software-vulkan`, and nothing else leaves this
# folder. ONNX Runtime goes to runtime/, developers' tools to .tools/, the tests' Python to .venv/, results to out/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The pinned tools, where they are there, go before the system's.
export PATH := $(CURDIR)/.tools/bin:$(PATH)

PROVISION := python3 tools/setup/provision.py
# One profile everywhere, lint included: dependencies, build scripts and macros are compiled once.
# A developer's change of Cargo.toml may update the lock file; CI must find it up to date.
CARGO_ARGS := --release $(if $(CI),--locked)
VIADUCT := target/release/viaduct

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

## Provisioning

.PHONY: setup
setup: ## Put the pinned ONNX Runtime and its WebGPU provider into runtime/
	@$(PROVISION) runtime runtime

.PHONY: software-vulkan
software-vulkan: ## Install a software Vulkan device, for machines without a GPU (apt, root; the only one to touch the system)
	@tools/setup/software_vulkan.sh

.PHONY: python
python: ## Make .venv with the Python packages that tests compare against
	@tools/setup/python.sh

.PHONY: cargo-deny cargo-nextest
cargo-deny:
	@$(PROVISION) .tools/bin cargo-deny
cargo-nextest:
	@command -v cargo-nextest >/dev/null || $(PROVISION) .tools/bin cargo-nextest

## Use

.PHONY: build
build: ## Build the program: target/release/viaduct
	cargo build $(CARGO_ARGS) --bin viaduct

.PHONY: build-hub-server
build-hub-server:
	cargo build $(CARGO_ARGS) --package viaduct-hub-server --bin hub-server

.PHONY: demo
demo: setup build ## Export the tiny model that ships with the project and draw a picture with it
	$(VIADUCT) export bundles/klein-emoji/source -o out/klein-emoji --profile q8 --force
	$(VIADUCT) generate -b out/klein-emoji -p "red apple" --seed 1000 -o out/red-apple.png --force
	@echo "The picture is in out/red-apple.png"

## Checks

.PHONY: lint
lint: cargo-deny ## Formatting, clippy, and the licences and sources of dependencies
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(CARGO_ARGS) -- -D warnings
	cargo deny check --hide-inclusion-graph licenses bans sources

.PHONY: test
test: setup python cargo-nextest ## Run all tests
	cargo nextest run --workspace $(CARGO_ARGS)

.PHONY: fuzz
fuzz: setup ## Put generated graphs and broken files through reader, passes and writer (MINUTES=10)
	tools/fuzz.sh $(or $(MINUTES),10)

.PHONY: check-setup
check-setup: ## Try `make setup` where it could go wrong: killed, corrupt files, no network, no permission
	@tools/setup/check_provision.sh

.PHONY: verify
verify: setup build python ## Compare the pipeline with the reference implementation, tensor by tensor
	tools/verify.sh

.PHONY: bench
bench: setup build build-hub-server python ## Measure speed and memory; fails where a download is slow or large (3 GB of disk)
	.venv/bin/python tools/bench/bench.py
	.venv/bin/python tools/bench/download.py

.PHONY: bench-gpu
bench-gpu: ## Measure a model of full size with random weights on the GPU, from a built tree (30 GB of disk; SECONDS_AT_MOST=540)
	python3 tools/bench/gpu.py --seconds $(or $(SECONDS_AT_MOST),540)

.PHONY: bench-rewrite
bench-rewrite: build ## Measure rewriting against other tools, on a model of 3 GiB (10 GB of disk, 12 GB of memory)
	@tools/setup/python.sh .cache/bench-rewrite tools/bench/requirements-rewrite.txt onnxsim,onnxslim
	.cache/bench-rewrite/bin/python tools/bench_rewrite.py

.PHONY: clean
clean: ## Remove everything that was built, provisioned or written here
	rm -rf target runtime out .venv .tools .cache
