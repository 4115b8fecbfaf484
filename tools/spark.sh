#!/bin/sh
# Run Spark's tests with the pyspark that is named (default 4.3.0), in an environment of its own.
set -eu
cd "$(dirname "$0")/.."
version=${1:-4.3.0}
[ $# -eq 0 ] || shift
home=.venv-spark-$version
if [ ! -x "$home/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$home"
fi
grep -iv -e '^pyspark==' -e '^py4j==' constraints.txt > "$home/constraints.txt"
stamp=$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat "$home/stamp" 2>/dev/null || true)" != "$stamp" ]; then
    echo "installing pyspark $version into $home ..."
    "$home/bin/python" -m pip install -q --disable-pip-version-check \
        -c "$home/constraints.txt" -e ".[dev]" "pyspark==$version"
    echo "$stamp" > "$home/stamp"
fi
[ $# -gt 0 ] || set -- tests/spark
exec "$home/bin/python" -m pytest "$@"
