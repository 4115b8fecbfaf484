#!/bin/sh
# Make .venv and install the project with its development tools, at the versions of constraints.txt.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed, $("$python" --version) is there: set PYTHON" >&2
    exit 1
}
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    # Debian keeps venv in a package of its own.
    if ! "$python" -m venv .venv >/dev/null 2>&1; then
        rm -rf .venv
        sudo=""
        [ "$(id -u)" = 0 ] || sudo="sudo -n"
        echo "installing python3-venv ..."
        { $sudo apt-get install -y -qq python3-venv || { $sudo apt-get update -qq && $sudo apt-get install -y -qq python3-venv; }; } >/dev/null 2>&1 || {
            echo "python3-venv is missing and cannot be installed: install it as root" >&2
            exit 1
        }
        "$python" -m venv .venv
    fi
fi
stamp=$(cat pyproject.toml constraints.txt | cksum)
[ "$(cat .venv/stamp 2>/dev/null || true)" = "$stamp" ] && exit 0
echo "installing into .venv ..."
# An environment may hold this project under another name, and a command of that name.
if .venv/bin/python -m pip show -q faststream-sqlbroker >/dev/null 2>&1; then
    .venv/bin/python -m pip uninstall -q -y faststream-sqlbroker
fi
.venv/bin/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
# pip would do it with one core. What cannot be compiled is no module of ours.
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
echo "$stamp" > .venv/stamp
