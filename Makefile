# Everything but `make gpu` runs in .venv; the first target that needs it makes it.
PYTHON ?= python3
PART ?= tests
# The repository's address, which replaces the word ADDRESS on the site's pages.
ADDRESS ?= ADDRESS
BIN := .venv/bin

.PHONY: quickstart chat rl course course-handout test coverage test-avx2 test-reliability test-models test-real bench-real test-course test-install test-serve test-versions test-gpu-code bench gpu docs lint format clean

# ROUNDING=SEED: matrix products are rounded as by another CPU. HEADROOM=2: tests have half of each tolerance.
ifdef ROUNDING
export PYTHONPATH := $(CURDIR)/tests/rounding$(PYTHONPATH:%=:%)
export HEADROOM ?= 2
endif

LAUNCH := $(BIN)/gpt2-accel launch accelerate_configs/cpu.yaml

quickstart: .venv/installed  ## train a small model on the Python standard library
	$(LAUNCH) recipes/quickstart.py

# The launcher's exit code is 0 after a run that a signal stopped, too.
FINISHED := grep -q '"state": "finished"'

chat: .venv/installed  ## a model that answers questions about Python's library: train, fine-tune, measure, in 8 minutes of CPU time
	$(LAUNCH) recipes/quickstart.py --config recipes/chat_base.yaml
	@$(FINISHED) runs/chat_base/status.json
	$(BIN)/python recipes/python_conversations.py --output data/python_questions
	$(LAUNCH) recipes/chat_sft.py --config recipes/chat_python.yaml
	@$(FINISHED) runs/chat_python/status.json
	$(BIN)/python recipes/evaluate.py --model runs/chat_python --tasks chat --data data/python_questions/held_out.jsonl
	@printf '%s\n' '' 'The 300 functions it knows, and a page to ask about them (pip install gradio):' \
		'  cat data/python_questions/functions.txt' '  $(BIN)/gpt2-accel demo --model runs/chat_python'

rl: .venv/installed  ## two-digit sums by reward alone, from a base that forgets carries: 3 minutes on 2 cores
	$(LAUNCH) recipes/changes/arithmetic.py --forgets 0.7 --output_dir runs/sums_base
	@$(FINISHED) runs/sums_base/status.json
	$(BIN)/python recipes/changes/arithmetic_tasks.py --output data/sums
	$(LAUNCH) recipes/chat_rl.py --model runs/sums_base --data data/sums/tasks.jsonl --output_dir runs/sums_rl --reward exact \
		--max_new_tokens 4 --batch_size 32 --micro_batch_size 32 --learning_rate 3e-4 --max_steps 60 --test_every 10
	@$(FINISHED) runs/sums_rl/status.json
	$(BIN)/python recipes/evaluate.py --model runs/sums_base runs/sums_rl --tasks chat --data data/sums/held_out.jsonl

course: .venv/installed-dev  ## the repository's address and badges for Colab and Kaggle in the course's notebooks: ADDRESS=https://github.com/…
	$(BIN)/python docs/notebooks.py address '$(or $(filter http%,$(ADDRESS)),$(error ADDRESS is the repository, https://github.com/…))'

course-handout: .venv/installed-dev  ## the course's notebooks without solutions and outputs, into build/course/
	$(BIN)/python docs/notebooks.py handout build/course

test: .venv/installed-dev  ## run the tests: offline, on CPU, three at a time, since they often wait; ROUNDING=1: as on another CPU
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

coverage: .venv/installed-dev  ## measure which lines the tests run, into build/coverage/; slower than `make test`
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses 3 --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet

# torch held to the instructions of a plain laptop: AVX2, no bf16 units.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
CPU_TESTS := tests/kernels tests/models/test_gpt2.py tests/models/test_llama.py tests/test_optim.py tests/runtime/test_device.py \
	tests/hf/test_convert.py tests/test_preferences.py tests/test_references.py

test-avx2: .venv/installed-dev  ## run the tests that depend on the CPU with the instructions of a plain laptop
	HEADROOM=2 $(AVX2) $(BIN)/python -m pytest --numprocesses 2 $(CPU_TESTS)

FAULTS := tests/reliability tests/runtime/test_signals.py tests/runtime/test_fsdp.py tests/recipes/test_bad_inputs.py tests/cli \
	tests/kernels tests/tools/study tests/benchmarks tests/data/test_prepare.py tests/data/test_source.py tests/hf/test_lora_runs.py \
	tests/recipes/test_changes.py tests/recipes/test_demo.py tests/test_preferences.py \
	tests/runtime/test_accelerate_config.py tests/test_architectures.py tests/recipes/test_evaluate.py \
	tests/runtime/test_trackers.py tests/runtime/test_launch.py tests/recipes/test_recipes.py tests/hf/test_hub.py tests/evals/test_kept.py tests/test_rewards.py

test-reliability: .venv/installed-dev  ## fault injection: kills, full disks, damaged files, bad gradients; 20 minutes
	RELIABILITY=long $(BIN)/python -m pytest $(FAULTS)

test-models: .venv/installed-dev  ## test all model families of transformers: resume, two processes, FSDP2, chat; 15 minutes
	RELIABILITY=long MODELS=long $(BIN)/python -m pytest tests/models/test_any_model.py

# A folder with smollm2-135m-instruct/ and gemma-3-270m/, Hugging Face directories.
MODELS ?= models

bench-real: .venv/installed-dev  ## speed and memory of fine-tuning two pretrained models, in MODELS; 60 minutes on 2 cores
	$(BIN)/python benchmarks/chat.py smollm2 gemma --models $(MODELS)
	$(BIN)/python benchmarks/table.py

test-real: .venv/installed-dev  ## test two pretrained models, in MODELS: logits, chat, fine-tuning; 30 minutes
	MODELS=$(MODELS) $(BIN)/python -m pytest tests/test_real_models.py

test-course: .venv/installed-dev  ## run all notebooks of course/ in one folder: as handed out, solved, with wrong answers; 20 minutes
	COURSE=long $(BIN)/python -m pytest tests/test_course.py

test-install: .venv/installed-dev  ## install the wheel and run the notebook in fresh environments: 10 minutes
	INSTALL=long $(BIN)/python -m pytest tests/test_install.py

test-versions:  ## part of the tests with the lowest and the newest supported libraries, in build/versions: 15 minutes
	$(PYTHON) tests/versions.py

test-gpu-code: .venv/installed-dev build/triton  ## without a GPU: bytes of a training step on an H100, the Triton kernel; 3 minutes
	PYTHONPATH=build/triton $(BIN)/python benchmarks/gpu_code.py
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/python -m pytest tests/kernels/test_softmax.py

test-serve: .venv/installed-dev .venv/llama/installed  ## compile llama.cpp, compare its tokens: 20 minutes
	LLAMA_PYTHON=$(CURDIR)/.venv/llama/bin/python $(BIN)/python -m pytest tests/hf/test_serving.py

bench: .venv/installed-dev  ## speed and memory against other trainers, into the pages of docs/: 30 minutes on 2 cores
	$(BIN)/python benchmarks/measure.py gpt2 qwen3 baby generation
	$(BIN)/python benchmarks/shakespeare.py
	$(BIN)/python benchmarks/chat.py quickstart
	$(BIN)/python benchmarks/table.py

GPU_tests := benchmarks/gpu_checks.py
GPU_bench := benchmarks/measure.py gpt2 generation
GPU_ladder := benchmarks/ladder.py

gpu:  ## checks or measurements on a GPU, offline, by the Python that is there: PART=tests, bench or ladder
	HF_HUB_OFFLINE=1 PYTHONPATH=".:$$PYTHONPATH" $(PYTHON) $(or $(GPU_$(PART)),$(error PART is tests, bench or ladder))

docs: .venv/installed-dev  ## the documentation's site, into site/; a dead link or a missing name fails: ADDRESS=the repository's
	$(BIN)/python docs/notebooks.py pages
	$(BIN)/zensical build --clean --strict
	find site -name '*.html' -o -name search.json | ADDRESS='$(ADDRESS)' xargs perl -pi -e 's{(\.\./)*\bADDRESS\b}{$$ENV{ADDRESS}}g'
	rm site/notebooks.py

lint: .venv/installed-dev  ## run the linter and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev  ## fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment; data/ and runs/ stay
	rm -rf .venv build site .cache *.egg-info

PIP := $(BIN)/python -m pip --disable-pip-version-check
HAS_GPU := -c 'import sys; from gpt2_accel.runtime.cores import may_have_gpu; sys.exit(not may_have_gpu())'

.venv/installed: setup.cfg setup.py pyproject.toml constraints.txt  # what training needs; TORCH=cuda: torch for GPUs in any case
	$(PYTHON) -m venv .venv
	@# pip's torch for Linux has CUDA. uv (18 MB) knows the index of the CPU build, unless pip has an index of its own.
	@[ "$(TORCH)" = cuda ] || $(BIN)/python $(HAS_GPU) || $(PIP) config list | grep -q index || { \
		$(PIP) install uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "$$(grep ^torch== constraints.txt)" \
		|| echo "uv could not install torch for CPUs: pip installs torch with CUDA, about 3 GB"; }
	$(PIP) install --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed  # what the other targets need
	$(PIP) install --constraint constraints.txt --editable '.[chat,demo,dev,docs,gguf,scale,serving,study,trackers]'
	touch $@

.venv/llama/installed: .venv/installed-dev
	$(PYTHON) -m venv .venv/llama
	$(PIP) install sentencepiece  # llama.cpp's converter needs it
	.venv/llama/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest .venv/llama \
		llama-cpp-python==0.3.36
	tar -xzf .venv/llama/llama_cpp_python-0.3.36.tar.gz -C .venv/llama --strip-components 2 --wildcards '*/vendor/llama.cpp/*'
	.venv/llama/bin/python -m pip install --quiet '.venv/llama/llama_cpp_python-0.3.36.tar.gz[server]'
	touch $@

build/triton:  # torch for a CPU has no Triton; 3.7.1 is the one of torch 2.13
	$(PIP) install --no-deps --target $@ triton==3.7.1
