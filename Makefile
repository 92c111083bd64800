PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP_INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help study test triton docs wheel bench clean

help:  ## List these targets
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-8s %s\n' "$$name" "$$text"; done

# torch comes first and pinned: a looser wish would bring the newest release with gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing torch (the pinned version, CPU build where pip finds one)"
	@$(PIP_INSTALL) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@echo "Installing nomax (editable) and its development tools"
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

study: $(INSTALLED)  ## Set up .venv if needed, run the first study on the bundled images, and write its page
	$(BIN)/nomax study alpha --out runs/results/alpha
	$(BIN)/nomax report runs/results --out runs/report.html

test: $(INSTALLED)  ## Set up .venv if needed, then run every check and test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2

triton: $(INSTALLED)  ## Test the Triton kernels without a GPU: interpreted, and compiled ahead of time
	@test -d .venv/triton/triton || { echo "Installing triton, into a folder of its own"; \
		$(PIP_INSTALL) --no-deps --target .venv/triton triton; }
	PYTHONPATH=.venv/triton TRITON_INTERPRET=1 $(BIN)/pytest -n 2 -q -m "triton and not slow" tests/ops
	PYTHONPATH=.venv/triton $(BIN)/python tools/triton_codegen.py --quick

docs: $(INSTALLED)  ## Build the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation: open $(CURDIR)/site/index.html in a browser; it needs no server."

wheel: $(INSTALLED)  ## Build wheels with compiled kernels for this platform and, given its compiler, for aarch64, into dist/
	NOMAX_BUILD_BINARY=1 $(BIN)/python -m build --wheel --no-isolation --outdir dist .
	@if test "$$(uname -sm)" = "Linux aarch64"; then :; elif command -v aarch64-linux-gnu-g++ > /dev/null; then \
		CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 NOMAX_BUILD_BINARY=1 \
			$(BIN)/python -m build --wheel --no-isolation --outdir dist .; \
	else echo "No wheel for aarch64: its compiler is missing (Debian: apt-get install g++-aarch64-linux-gnu)"; fi

bench: $(INSTALLED)  ## Measure speed against softmax attention on this machine
	$(BIN)/nomax bench attention

clean:  ## Remove .venv, built files and the tools' caches
	rm -rf .venv dist build site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
