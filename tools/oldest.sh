#!/bin/sh
# Run tests with the oldest SQLAlchemy that pyproject.toml allows, in an environment of its own.
set -eu
cd "$(dirname "$0")/.."
oldest=$(sed -n 's/.*"sqlalchemy\[asyncio\]>=\([0-9.]*\)".*/\1/p' pyproject.toml)
if [ ! -x .venv-oldest/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv-oldest
fi
grep -iv '^sqlalchemy==' constraints.txt > .venv-oldest/constraints.txt
echo "installing SQLAlchemy $oldest into .venv-oldest ..."
# An environment may hold this project under another name, and a command of that name.
if .venv-oldest/bin/python -m pip show -q faststream-sqlbroker >/dev/null 2>&1; then
    .venv-oldest/bin/python -m pip uninstall -q -y faststream-sqlbroker
fi
.venv-oldest/bin/python -m pip install -q --disable-pip-version-check \
    -c .venv-oldest/constraints.txt -e ".[dev]" "sqlalchemy==$oldest"
.venv/bin/python -m tools.servers run -- \
    .venv-oldest/bin/python -m pytest -n 2 tests/contract tests/flow tests/schema tests/faststream tests/plans "$@"
