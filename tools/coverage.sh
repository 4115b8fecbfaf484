#!/bin/sh
# Run the tests with coverage (of the tests' own processes; those that they start and kill are not counted).
set -eu
cd "$(dirname "$0")/.."
rm -f .coverage .coverage.*
.venv/bin/python -m pytest -n 2 --dist loadfile --cov --cov-report= "$@"
.venv/bin/python -m coverage report
