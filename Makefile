# The recipes that people and CI share. Everything is installed into .venv; nothing outside this folder changes,
# except by `make test` as root, which installs the missing system packages (see scripts/system-packages).

PY := .venv/bin/python
HOST_SIDE := remote_jobs/protocol.py remote_jobs/agent remote_jobs/logs
T ?= tests

.DEFAULT_GOAL := help
.PHONY: help demo test pipeline lint coverage mutate orders wheel bench setup clean

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
	@scripts/audit

test: lint  ## lint, then every test; minutes per group at the end; T=tests/sshd for one group
	$(PY) -m pytest $(T) </dev/null

pipeline: setup  ## of the tests, those with real vLLM and speculators (builds their environment once: 4 minutes, 4 GB)
	$(PY) -m pytest tests/pipeline -m heavy --durations=0 --durations-min=5 </dev/null

coverage: setup  ## branch coverage of the light tests, our child processes on the laptop's side included; T=... for one group
	$(PY) -m coverage erase
	-$(PY) -m coverage run -m pytest $(T) -m "not heavy" -p no:cacheprovider </dev/null
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

mutate: setup  ## mutation testing of states, retry policy and log rules; M="policy fold" for some areas, SHARE=30 per cent
	@$(PY) scripts/mutate.py $(M) </dev/null

orders: setup  ## the light tests twice in random orders, then by two processes at once; T=tests/core for one group
	$(PY) -m pytest $(T) -m "not heavy" --shuffle $(shell date +%s) -q </dev/null
	$(PY) -m pytest $(T) -m "not heavy" --shuffle $(shell date +%s) -q </dev/null
	$(PY) -m pytest $(T) -m "not heavy" --shuffle $(shell date +%s) -q -n 2 --dist loadfile </dev/null

wheel: setup  ## install the wheel from the package index into a clean environment of every promised Python found here
	@scripts/try-wheel

bench: setup  ## the figures of the README, measured beside plain OpenSSH; B="launch watch" for some sections
	$(PY) -m bench $(B) </dev/null

clean:  ## remove what the recipes made
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
