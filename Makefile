# The recipes that people and CI share. Everything is installed into .venv; nothing outside this folder changes,
# except by `make test` as root, which installs the missing system packages (see scripts/system-packages).

PY := .venv/bin/python
HOST_SIDE := remote_jobs/protocol.py remote_jobs/agent remote_jobs/logs
T ?= tests

.DEFAULT_GOAL := help
.PHONY: help demo test pipeline lint bench setup clean

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

demo:  ## a real extraction job on a real SSH host, crashed, retried and checked: two minutes, no GPU
	@scripts/venv demo
	@.venv/bin/orch demo

setup:  ## everything that `make test` needs: system packages (as root) and .venv
	@scripts/system-packages
	@scripts/venv demo dev

lint: setup  ## ruff, mypy --strict, import layers, Python 3.8 on the host side
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/vermin --quiet --no-tips --violations --target=3.8- $(HOST_SIDE)

test: lint  ## lint, then every test but the pipeline's heavy ones; T=tests/sshd for one group
	$(PY) -m pytest $(T) -m "not heavy" </dev/null

pipeline: setup  ## the heavy tests: real vLLM and speculators on CPU (builds their environment once: 4 minutes, 4 GB)
	$(PY) -m pytest tests/pipeline </dev/null

bench: setup  ## the figures of the README, measured beside plain OpenSSH; B="launch watch" for some sections
	$(PY) -m bench $(B) </dev/null

clean:  ## remove what the recipes made
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
