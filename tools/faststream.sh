#!/bin/sh
# Run the tests that FastStream takes part in with the FastStream that is named, in an environment
# of its own. What it lacks comes from .venv.
set -eu
cd "$(dirname "$0")/.."
version=${1:?"give a version of FastStream, such as 0.7.8"}
shift
folder=$PWD/.faststream-$version
python=$folder/bin/python
if [ ! -d "$folder" ]; then
    echo "installing FastStream $version into .faststream-$version ..."
    rm -rf "$folder.new"
    .venv/bin/python -m venv "$folder.new"
    grep -iv -e '^faststream==' -e '^fast-depends==' constraints.txt > "$folder.new/constraints.txt"
    "$folder.new/bin/python" -m pip install -q --disable-pip-version-check \
        -c "$folder.new/constraints.txt" "faststream==$version"
    # An editable install is found by a .pth file, which only addsitedir reads.
    own=$("$folder.new/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    shared=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
    echo "import site; site.addsitedir('$shared')" > "$own/shared.pth"
    mv "$folder.new" "$folder"
fi
used=$("$python" -c 'from importlib.metadata import version; print(version("faststream"))')
[ "$used" = "$version" ] || { echo "FastStream $used is imported instead of $version" >&2; exit 1; }
unset PYTHONDONTWRITEBYTECODE
[ $# -gt 0 ] || set -- tests/unit tests/pipeline tests/faststream tests/docs/test_cli.py tests/docs/test_examples.py
exec "$python" -m pytest -n 2 "$@"
