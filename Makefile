# make demo     compare answers with and without pan and scan on sample documents (writes demo/)
# make test     run the test suite in three processes: a third of its time on two cores would be waiting
# make test-real  run the tests on trained weights, which it installs into REAL_CACHE (280 MB; needs npm)
# make test-transformers VERSION=5.24.0  run the tests that compare with Transformers on another version of it
# make test-clients  run other projects' clients against `panscan serve`, in an environment in CLIENTS_VENV
# make check    run ruff, mypy and import-linter
# make format   fix lint findings and format the code
# make docs     build the documentation site (writes site/)
# make clean    remove .venv and everything that these targets write
#
# Each target installs only what it needs into .venv, the first time and after a change of pyproject.toml or
# constraints.txt: demo the package and its server, test and check also the dev and training extras, docs only MkDocs.
#
# On Linux without an NVIDIA GPU, the CPU build of PyTorch saves gigabytes; see TORCH_INDEX under "Install" in README.md.

PYTHON ?= python3
TORCH_INDEX ?=
REAL_CACHE ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/panscan-real
CLIENTS_VENV ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/panscan-clients
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
PINNED := $(PIP) -c constraints.txt

# Stamps: a file's time says when the step last succeeded.
CREATED := $(VENV)/.created
TORCH := $(VENV)/.installed-torch
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
TOOLS := $(VENV)/.installed-tools
CLIENTS := $(CLIENTS_VENV)/.installed
OTHER := $(VENV)/transformers-$(VERSION)
CONFORMANCE := tests/model tests/runners tests/images tests/verdict tests/engine/test_conformance.py tests/test_api.py

.PHONY: install tools demo test test-real test-transformers test-clients check format docs clean

install: $(BASE)

tools: $(TOOLS)

# Python's own pip takes three times the CPU time of the newest for these two hundred packages.
$(CREATED):
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	touch $@

$(TORCH): constraints.txt | $(CREATED)
	$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) $(shell grep '^torch==' constraints.txt))
	touch $@

$(BASE): pyproject.toml constraints.txt $(TORCH)
	$(PINNED) -e ".[serve]"
	touch $@

# Includes everything in $(BASE), so that 'make demo' after 'make test' has nothing to install.
$(DEV): pyproject.toml constraints.txt $(TORCH)
	$(PINNED) -e ".[dev,training]"
	touch $(BASE) $@

# The requirements of the extra without the package itself, which would install PyTorch.
$(DOCS): pyproject.toml constraints.txt | $(CREATED)
	$(PINNED) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# What test, check and docs need, resolved once.
$(TOOLS): pyproject.toml constraints.txt $(TORCH)
	$(PINNED) -e ".[dev,training,docs]"
	touch $(BASE) $(DEV) $(DOCS) $@

# Apart from ours, whose constraints the clients do not meet.
$(CLIENTS): tests/clients/requirements.txt
	$(PYTHON) -m venv "$(CLIENTS_VENV)"
	"$(CLIENTS_VENV)/bin/python" -m pip install --disable-pip-version-check -r $<
	if command -v npm; then npm install --no-audit --no-fund --prefix "$(CLIENTS_VENV)/npm" openai@6.49.0; fi
	touch "$@"

demo: $(BASE)
	$(BIN)/panscan demo --force
	@echo "Next: source $(BIN)/activate, then panscan --help"

test: $(DEV)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Gemma's terms of use apply to the weights; the first package contains them.
test-real: $(DEV)
	PANSCAN_REAL_CACHE="$(REAL_CACHE)" $(BIN)/python -m pytest tests/real

# Beside .venv, whose own version stays: only Transformers and what it needs come from there.
test-transformers: $(DEV)
	$(if $(VERSION),,$(error name a version of Transformers: make test-transformers VERSION=5.24.0))
	sed -E '/^(transformers|huggingface[-_]hub)==/d' constraints.txt > "$(OTHER).txt"
	$(PIP) --quiet --target "$(OTHER)" -c "$(OTHER).txt" transformers==$(VERSION)
	PYTHONPATH="$(CURDIR)/$(OTHER)" $(BIN)/python -m pytest -n 3 --dist worksteal $(CONFORMANCE)

test-clients: $(DEV) $(CLIENTS)
	$(BIN)/python -m benchmarks.clients --python "$(CLIENTS_VENV)/bin/python"

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)
	$(BIN)/mkdocs build --strict
	@echo "Open site/index.html, or run '$(BIN)/mkdocs serve' for a live preview with search"

clean:
	rm -rf $(VENV) runs demo site .mypy_cache .ruff_cache .pytest_cache .hypothesis
