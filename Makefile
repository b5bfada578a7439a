# make demo   installs into .venv and shows what pan and scan brings and costs, on made-up documents (into demo/)
# make test   the suite        make check   ruff, mypy, import-linter        make format   mend what can be mended
#
# Without an NVIDIA GPU on Linux, PyTorch's CPU build saves gigabytes; see "Install" in README.md for TORCH_INDEX.

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: install demo test check format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --index-url $(TORCH_INDEX) $(shell grep '^torch==' constraints.txt))
	$(PIP) -e ".[dev,training]"
	touch $@

demo: install
	$(BIN)/panscan demo --again
	@echo "Next: source $(VENV)/bin/activate, then panscan --help"

test: install
	$(BIN)/python -m pytest -n 2

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
