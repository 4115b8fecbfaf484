#!/bin/sh
# Run Spark's tests with the pyspark that is named (default 4.3.0), which lies in a folder before those of .venv.
set -eu
cd "$(dirname "$0")/.."
version=${1:-4.3.0}
[ $# -eq 0 ] || shift
folder=$PWD/.spark-$version
if [ ! -d "$folder" ]; then
    echo "installing pyspark $version into .spark-$version ..."
    rm -rf "$folder.new"
    .venv/bin/python -m pip install -q --disable-pip-version-check --target "$folder.new" "pyspark==$version"
    mv "$folder.new" "$folder"
fi
unset PYTHONDONTWRITEBYTECODE
[ $# -gt 0 ] || set -- tests/spark
PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} exec .venv/bin/python -m pytest "$@"
