#!/bin/sh
# Run the tests with coverage, worker processes of the tests included.
set -eu
cd "$(dirname "$0")/.."
rm -f .coverage .coverage.*
export COVERAGE_PROCESS_START="$PWD/pyproject.toml"
.venv/bin/python -m pytest -n 2 --dist loadfile --cov --cov-report= "$@"
.venv/bin/python -m coverage report
