# Needs Python 3.10 to 3.13 and make; everything else goes into a virtual environment.
#
#   VENV=DIR       where that environment is (.venv)
#   PYTHON=PROGRAM what it is made with (the first suitable Python on the PATH)
#   BACKEND=NAME   Keras' backend, with an environment of its own (.venv-jax): make test BACKEND=jax or torch
#   PYTEST_ARGS=   more arguments for pytest, such as PYTEST_ARGS="-k ring -x"; PYTEST_ARGS="-n 0" takes one process

BACKEND ?=
VENV ?= .venv$(BACKEND:%=-%)
PYTHON ?=
PYTEST_ARGS ?=

# Of `make fuzz`: inputs of each property, and seconds of each that Atheris tries.
FUZZ_EXAMPLES ?= 3000
FUZZ_SECONDS ?= 60
# A test has all its examples in it: each conversation of one has a deadline of its own.
FUZZ_TIME = --timeout=7200 -o faulthandler_timeout=0

# Two processes of pytest; tests that share a Spark session, or a pool of processes, run in one (tests/support/grouping.py).
PYTEST = -m pytest -n 2 --dist loadscope

ifdef BACKEND
# Without TensorFlow, which Keras would import where it is installed. The tests are those in which Keras computes.
EXTRAS = spark,java,jobs,$(BACKEND),test,dev
TESTS = tests/backends tests/rank tests/driver tests/task tests/training tests/modeling $(addprefix tests/spark/test_,fit.py transform.py evaluate.py \
	failures.py checkpoints.py asynchronous.py published_examples.py)
export KERAS_BACKEND = $(BACKEND)
else
EXTRAS = local,test,dev,docs
TESTS =
endif

# What has a target of its own, because all tests together have 40 minutes.
OWN_TIME = --ignore=tests/kubernetes --ignore=tests/trackers

# What benchmarks may leave open: they use untyped libraries. Names and arguments that do not exist are errors there too.
LOOSE_TYPES = arg-type assignment call-overload import-not-found import-untyped misc union-attr

# Python keeps bytecode, whatever the shell says: hundreds of processes of the tests import this package.
export PYTHONDONTWRITEBYTECODE :=

# pip installs this package as a folder on Python's path: type checkers and editors do not follow an import hook.
export PIP_CONFIG_SETTINGS := editable_mode=compat

# Recipes read these as shell variables, so that a path may contain spaces.
export VENV PYTHON EXTRAS

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format clean venv audit

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile

demo: venv ## train on two Spark executors of this machine, against one process
	@"$$VENV/bin/python" examples/digits.py

test: venv ## test every promise at least once (PYTEST_ARGS="-k ring -x" for some)
	@"$$VENV/bin/python" tests/support/class_archive.py
	@"$$VENV/bin/python" $(PYTEST) -m "not slow and not gpu" -p no:randomly --hypothesis-profile=dev $(TESTS) $(PYTEST_ARGS)

test-all: venv ## run all tests, in random order and with more examples, within tests/budget.toml
	@"$$VENV/bin/python" tests/support/class_archive.py
	@"$$VENV/bin/python" $(PYTEST) -p randomly --hypothesis-profile=ci --budget=tests/budget.toml $(OWN_TIME) $(TESTS) $(PYTEST_ARGS)

.PHONY: test-kubernetes
test-kubernetes: venv ## test Spark's Kubernetes back end with processes as pods, as root (not part of test-all: minutes)
	@"$$VENV/bin/python" -m pytest tests/kubernetes -p no:randomly $(PYTEST_ARGS)

.PHONY: test-trackers
test-trackers: venv ## test the callbacks of W&B, Comet, Neptune and TensorBoard, offline (not part of test-all: 45 more packages)
	@"$$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[trackers]"
	@"$$VENV/bin/python" -m pytest tests/trackers -p no:randomly $(PYTEST_ARGS)

.PHONY: test-yarn
test-yarn: venv ## test the jobs on YARN and HDFS, whose programs come from Maven Central (part of test-all)
	@"$$VENV/bin/python" -m pytest tests/yarn -p no:randomly $(PYTEST_ARGS)

check: venv ## formatting, lint, types, and the house: which folder imports what, names
	@"$$VENV/bin/python" -m ruff format --check .
	@"$$VENV/bin/python" -m ruff check .
	@"$$VENV/bin/python" -m mypy
	@"$$VENV/bin/python" -m mypy --no-warn-unused-ignores $(LOOSE_TYPES:%=--disable-error-code=%) benchmarks/*.py
	@"$$VENV/bin/python" -m pytest -q tests/test_layers.py tests/test_names.py tests/test_private_names.py
	@"$$VENV/bin/python" tests/support/longest_modules.py

format: venv ## rewrite the files as `make check` wants them
	@"$$VENV/bin/python" -m ruff format .
	@"$$VENV/bin/python" -m ruff check --fix .

.PHONY: docs
docs: venv ## build the documentation site into site/ (open site/index.html)
	@NO_MKDOCS_2_WARNING=1 "$$VENV/bin/python" -m mkdocs build --quiet
	@echo "site/index.html"

.PHONY: notebooks
notebooks: venv ## run tutorials whose script has changed, and write their notebooks (NOTEBOOKS_ARGS="text tuning" for some)
	@"$$VENV/bin/python" tests/support/notebooks.py $(NOTEBOOKS_ARGS)

.PHONY: bench
bench: venv ## compare with the native way, and write benchmarks/results and the README's chart (BENCH_ARGS="--torch FOLDER")
	@"$$VENV/bin/python" benchmarks/results.py $(BENCH_ARGS)

.PHONY: soak
soak: venv ## kill something every 15 s in fits of 20 minutes, and see what they give and leave (SOAK_ARGS="--minutes 5")
	@"$$VENV/bin/python" benchmarks/soak.py $(SOAK_ARGS)

.PHONY: faults
faults: venv ## kill, freeze, crash, cut, fill and shift one thing a fit, as root: hours (FAULTS_ARGS="--most 40 --seed 5")
	@"$$VENV/bin/python" benchmarks/faults.py $(FAULTS_ARGS)

.PHONY: gpu-check
gpu-check: venv ## try this machine's GPUs with real ranks, without Spark (GPU_CHECK_ARGS="--backend torch")
	@"$$VENV/bin/python" benchmarks/gpu_check.py $(GPU_CHECK_ARGS)

.PHONY: mutate
mutate: venv ## plant small faults, one at a time, and see that tests find them (MUTATE_ARGS="--only ring")
	@"$$VENV/bin/python" tests/mutations/run.py $(MUTATE_ARGS)

.PHONY: fuzz
fuzz: venv ## try parsers and servers with many more odd inputs: half an hour (FUZZ_EXAMPLES=20000, FUZZ_SECONDS=300)
	@FUZZ_EXAMPLES="$(FUZZ_EXAMPLES)" "$$VENV/bin/python" $(PYTEST) $(FUZZ_TIME) tests/fuzz -p no:randomly --hypothesis-profile=fuzz $(PYTEST_ARGS)
	@"$$VENV/bin/python" tests/fuzz/coverage_guided.py $(FUZZ_SECONDS)

.PHONY: test-versions
test-versions: venv ## run some tests with the versions of tests/versions/matrix.yaml: over an hour (VERSIONS_ARGS="--only emr")
	@"$$VENV/bin/python" tests/versions/run.py $(VERSIONS_ARGS)

.PHONY: wheels
audit: venv ## ask for known holes in what is installed here, and in the oldest versions that setup.py takes
	@"$$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[release]"
	@"$$VENV/bin/pip-audit" --skip-editable
	@"$$VENV/bin/python" tests/support/lower_bounds.py > "$$VENV/lower-bounds.txt"
	@"$$VENV/bin/pip-audit" --no-deps --disable-pip -r "$$VENV/lower-bounds.txt"

wheels: venv ## build into dist/ what a release publishes: source, a wheel with the kernels, a pure one
	@"$$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[release]"
	@rm -rf build dist
	@"$$VENV/bin/cyclonedx-py" environment --output-format JSON --output-file docs/sbom.cdx.json "$$VENV/bin/python"
	@"$$VENV/bin/python" -m build --outdir dist .
	@rm -rf build
	@CC=none "$$VENV/bin/python" -m build --wheel --outdir dist .
	@rm -rf build
	@for wheel in dist/*-linux_*.whl; do [ ! -e "$$wheel" ] || \
		{ PATH="$$(cd "$$VENV/bin" && pwd):$$PATH" "$$VENV/bin/python" -m auditwheel repair -w dist "$$wheel" && rm "$$wheel"; }; done
	@"$$VENV/bin/python" -m twine check --strict dist/*

clean: ## remove the virtual environment and what tools left behind
	@if [ -f "$$VENV/pyvenv.cfg" ]; then rm -rf "$$VENV"; fi
	@rm -rf build dist site .cache elephant_spark.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. The stamp says for which checkout and which PYTHON it was installed, and is
# written last: an interrupted install is redone, and so is one older than the metadata.
define INSTALL
stamp="$$VENV/.installed"
log="$$VENV/install.log"
key="$$(pwd) $$PYTHON $$EXTRAS"

fail() {
    echo "elephant: $$1" >&2
    exit 1
}

up_to_date() {
    [ -x "$$VENV/bin/python" ] && [ "$$(cat "$$stamp" 2>/dev/null)" = "$$key" ] &&
        [ -z "$$(find setup.py pyproject.toml elephant/*/native/*.c elephant/*/*/native/*.c -newer "$$stamp")" ]
}

# By running it: a program named python3.10 may be a shim that has no Python to start.
suits() {
    "$$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    bare=
    if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; else set -- python3 python3.13 python3.12 python3.11 python3.10 python; fi
    for candidate; do
        suits "$$candidate" || continue
        "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 && echo "$$candidate" && return
        bare="$$candidate"
    done
    [ -z "$$bare" ] || fail "$$bare cannot make a virtual environment because its modules venv and ensurepip are not both there; install them (on Debian and Ubuntu: apt-get install python3-venv) or name another Python with PYTHON=."
    [ -z "$$PYTHON" ] || fail "expected a Python from 3.10 to 3.13 that runs, received PYTHON=$$PYTHON; leave PYTHON out or name another one."
    fail "expected a Python from 3.10 to 3.13 on the PATH and found none that runs; install one or name it with PYTHON=/path/to/python3."
}

make_environment() {
    if [ -e "$$VENV" ] && [ ! -f "$$VENV/pyvenv.cfg" ] && [ -n "$$(ls -A "$$VENV")" ]; then
        fail "VENV=$$VENV holds something that is not a virtual environment; remove it or name another place."
    fi
    python=$$(find_python) || exit 1
    said=$$("$$python" -m venv --clear "$$VENV" 2>&1) ||
        fail "$$python could not make the virtual environment $$VENV: $$(echo "$$said" | tail -n 1)"
}

# From the log too: what pip runs to build a package tells its errors only there.
cause() {
    case "$$said $$(grep -E 'WARNING|ERROR' "$$log")" in
        *"No space left on device"*) echo "the disk is full" ;;
        *"Retry(total=0"* | *"Max retries exceeded"* | *ReadTimeoutError* | *"Could not connect"*)
            echo "no package registry could be reached" ;;
        *) grep 'ERROR: ' "$$log" | tail -n 1 | sed 's/^.*ERROR: //' ;;
    esac
}

install() {
    echo "Installing into $$VENV, which takes a few minutes and 3.5 GB the first time ($$log grows meanwhile)" >&2
    rm -f "$$stamp" "$$log"
    said=$$("$$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --log "$$log" -e ".[$$EXTRAS]" 2>&1) ||
        fail "the packages could not be installed: $$(cause) (pip's log is $$log)."
    echo "$$key" > "$$stamp"
}

usable() {
    { [ -z "$$PYTHON" ] || [ "$$(cat "$$stamp" 2>/dev/null)" = "$$key" ]; } &&
        suits "$$VENV/bin/python" && "$$VENV/bin/python" -m pip --version >/dev/null 2>&1
}

up_to_date && exit 0
usable || make_environment
install
endef
export INSTALL

venv:
	@sh -c "$$INSTALL"
