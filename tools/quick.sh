#!/bin/sh
# The inner loop, under a minute on two idle cores: unit tests, and the contract of the store on
# SQLite, by two processes. Arguments are pytest's.
set -eu
cd "$(dirname "$0")/.."
for kind in POSTGRESQL MARIADB MYSQL; do
    export "SQLBROKER_TEST_${kind}_URL_MISSING=test-quick runs on SQLite only"
done
# Each of the processes would compile everything anew.
unset PYTHONDONTWRITEBYTECODE
# The summary counts what is skipped; -r leaves out its list.
exec .venv/bin/python -m pytest -q -rfE -n 2 tests/unit tests/contract "$@"
