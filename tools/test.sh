#!/bin/sh
# Run what is named, else all tests, by several processes: one of them owns the Spark session.
# Arguments are pytest's; COVERAGE=1 counts the lines of the tests' own processes, not of those they start and kill.
set -eu
cd "$(dirname "$0")/.."
counted=""
if [ -n "${COVERAGE:-}" ]; then
    rm -f .coverage .coverage.*
    counted="--cov --cov-report=term-missing:skip-covered"
fi
# Each of the processes, and those they start, would compile everything anew.
unset PYTHONDONTWRITEBYTECODE
# shellcheck disable=SC2086
exec .venv/bin/python -m pytest -n 4 --dist loadfile $counted "$@"
