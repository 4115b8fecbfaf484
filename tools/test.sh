#!/bin/sh
# Run what is named, else all tests: Spark's by themselves at the end, as a session takes both cores and has one owner.
# Arguments are pytest's; COVERAGE=1 counts the lines of the tests' own processes, not of those they start and kill.
set -eu
cd "$(dirname "$0")/.."
pytest=".venv/bin/python -m pytest"
counted=""
if [ -n "${COVERAGE:-}" ]; then
    rm -f .coverage .coverage.*
    # The report at the end says whether it is enough: each part alone is not.
    counted="--cov --cov-report= --cov-fail-under=0"
fi
failed=0
for argument in "$@"; do
    case $argument in tests*) named=yes ;; esac
done
if [ -n "${named:-}" ]; then
    $pytest -n 2 --dist loadfile $counted "$@" || failed=1
else
    # With arguments such as -k one of the parts may have no test (5).
    $pytest -n 2 --dist loadfile --ignore=tests/spark $counted "$@" || [ $? -eq 5 -a $# -gt 0 ] || failed=1
    $pytest ${counted:+$counted --cov-append} "$@" tests/spark || [ $? -eq 5 -a $# -gt 0 ] || failed=1
fi
if [ -n "${COVERAGE:-}" ]; then
    .venv/bin/python -m coverage report || failed=1
fi
exit $failed
