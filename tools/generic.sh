#!/bin/sh
# Run tests with FastStream's own pipeline in place of the compiled one, by two processes.
set -eu
cd "$(dirname "$0")/.."
export SQLBROKER_PIPELINE=generic
# Each of the processes would compile everything anew.
unset PYTHONDONTWRITEBYTECODE
[ $# -gt 0 ] || set -- tests/faststream tests/contract tests/faults/test_short.py
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
