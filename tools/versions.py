"""Run the tests on other versions of databases, Python and libraries; keep what came out.

    python -m tools.versions [CELL ...] [-- PYTEST ARGUMENTS]

Without a CELL all run, one after the other. What comes out of whole cells is kept in
tests/versions.json, from which the table in docs/reference/databases.md and the classifiers of
pyproject.toml are written. With arguments of pytest nothing is kept: they choose other tests, or
some of them.

PostgreSQL is npm's, MariaDB and Python are a newer Debian's; both are unpacked into the cache
folder, and nothing is installed. An interpreter that Debian has not is taken from PATH or pyenv.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from tools import oldest, private, servers, unstable
from tools.files import update_block
from tools.version_cells import PROJECT, Cell, cells, read_project

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "tests" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "databases.md"
OWN_PYTHON = "3.11"
"""Python of all other tests."""
EXTRAS = (
    "postgresql",
    "mysql",
    "sqlite",
    "psycopg",
    "asyncmy",
    "migrations",
    "schedule",
    "fastapi",
    "cli",
    "http",
    "client",
    "config",
)
"""Extras that other interpreters get, so that the tests of `FOLDERS` can be imported."""
TESTING = ("hypothesis", "pytest", "pytest-asyncio", "pytest-cov", "pytest-timeout", "pytest-xdist")
"""Distributions of the extra `dev` that run them."""
LIBRARIES = ("SQLAlchemy", "asyncpg", "psycopg", "aiomysql", "asyncmy", "aiosqlite", "uvloop")
"""Which versions of them are kept, if they are there."""


class MissingError(Exception):
    """A version cannot be had here; the text says why."""


@contextmanager
def started(cell: Cell) -> Iterator[dict[str, str]]:
    """The servers of the cell, as variables for the tests, and what they say that they are.

    Raises:
        MissingError: one cannot be had here, or is of another version.
    """
    found: dict[str, str] = {}
    with ExitStack() as stack:
        for kind in cell.databases:
            if kind not in servers.VARIABLES:
                continue
            try:
                if cell.programs is not None and kind == cell.databases[0]:
                    stack.enter_context(_first_on_path(cell.programs()))
                    url, process = stack.enter_context(private.STARTERS[kind]())
                    found[f"{servers.VARIABLES[kind]}_LOG"] = str(process.log)
                else:
                    url = stack.enter_context(servers.server(kind))
            except (
                unstable.DownloadError,
                private.CannotStartError,
                servers.NoServerError,
            ) as error:
                raise MissingError(str(error)) from None
            found[servers.VARIABLES[kind]] = url
            found[f"{servers.VARIABLES[kind]}_VERSION"] = servers.version_of(url)
        for kind, variable in servers.VARIABLES.items():
            if kind not in cell.databases:
                found[f"{variable}_MISSING"] = f"{cell.name} does without"
        yield found


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Servers that tests start, too, are those of `folder`."""
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def interpreter(version: str) -> Path:
    """Path of Python `version`: unpacked, on PATH, or pyenv's.

    Raises:
        MissingError: it is not there.
    """
    name = f"python{version}"
    if version in unstable.PYTHONS:
        try:
            return unstable.unpacked(unstable.PYTHONS[version]) / name
        except unstable.DownloadError as error:
            raise MissingError(str(error)) from None
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"*/bin/{name}"), reverse=True)
    for path in (shutil.which(name), *pyenv):
        # What pyenv puts on PATH fails while this version is not chosen.
        if path and subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0:
            return Path(path)
    raise MissingError(f"Debian, PyPI and npm have no {name}, and none is on PATH or pyenv's")


def environment(cell: Cell) -> Path:
    """The interpreter that runs the tests, with what it needs.

    Raises:
        MissingError: there is no such interpreter, or the requirements do not fit it.
    """
    if not cell.python and not cell.wanted:
        return Path(sys.executable)
    wanted = list(cell.wanted)
    used: Path | None = None
    if cell.python:
        used = interpreter(cell.python)
        tools = {one.name: one for one in oldest.requirements(read_project())[oldest.OWN]}
        wanted += ["-e", f"{ROOT}[{','.join(EXTRAS)}]", *(str(tools[name]) for name in TESTING)]
    try:
        python = oldest.install(wanted, ROOT / f".venv-{cell.name}", used)
    except RuntimeError as error:
        print(error)
        raise MissingError(str(error).splitlines()[-1]) from None
    if cell.startup:
        own = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        (Path(own.strip()) / "startup.pth").write_text(cell.startup)
    return python


_VERSIONS = f"""
import asyncio, json, platform, sqlite3, sys
from importlib.metadata import PackageNotFoundError, version
found = {{"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version}}
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    found["Python"] += "t"
for name in {LIBRARIES}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
loop = asyncio.new_event_loop()
if not type(loop).__module__.startswith("uvloop"):
    found.pop("uvloop", None)  # installed, but it runs nothing
loop.close()
print(json.dumps(found))
"""


def run(cell: Cell, options: Sequence[str]) -> dict[str, Any]:
    """Run the cell's tests; `options` are arguments of pytest that come after these.

    Raises:
        MissingError: the version cannot be had here.
    """
    if cell.missing:
        raise MissingError(cell.missing)
    python = environment(cell)
    with tempfile.TemporaryDirectory() as name, started(cell) as variables:
        report = Path(name) / "report.xml"
        found = json.loads(subprocess.check_output([python, "-c", _VERSIONS], text=True))
        for kind, variable in servers.VARIABLES.items():
            if said := variables.get(f"{variable}_VERSION"):
                # "PostgreSQL 18.4 on x86_64…", "11.8.9-MariaDB-…", "9.7.4-2"
                number = re.search(r"\d+(\.\d+)+", said)
                found[_NAMES[kind]] = number[0] if number else said
        used = str(found.get(cell.what, ""))
        if not cell.is_version(used):
            raise MissingError(f"what runs is {used or 'something else'}")
        tests = [one for one in options if one.startswith("tests/")]
        passed = oldest.run(
            python,
            [
                *("-n", "auto", "--dist", "loadfile", f"--junitxml={report}"),
                *("-k", " or ".join(cell.databases)),
                *(option for option in options if option not in tests),
                *(tests or [f"tests/{folder}" for folder in cell.folders]),
            ],
            **cell.variables,
            **variables,
        )
        counts = read_report(report)
        if passed:  # what failed has passed alone
            counts["passed"] += len(counts["failed"])
            counts["failed"] = {}
        if not counts["failed"] and not (passed and counts["passed"]):
            counts["failed"] = {"pytest": "it has run no test, or did not end in order"}
        return {"with": found, **counts}


_NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}


def read_report(report: Path) -> dict[str, Any]:
    """How many tests have passed and were skipped, and the first line of what failed."""
    passed = skipped = 0
    failed: dict[str, str] = {}
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failed": {}}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest's own
        problems = [*case.findall("failure"), *case.findall("error")]
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if problems:
            failed[name] = (problems[0].get("message") or "").strip().split("\n")[0]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": failed}


def table(results: Mapping[str, Any]) -> str:
    """Markdown of what has come out, and of what failed."""
    lines = [
        "| version | with | folders of tests | passed | skipped | failed | on |",
        "|---|---|---|---|---|---|---|",
    ]
    failures = []
    for cell in cells():
        result = results.get(cell.name, {"missing": "not run yet"})
        if reason := result.get("missing"):
            title = f"{cell.what} {cell.version}".strip()
            lines.append(f"| {title} | untested: {reason} | | | | | |")
            continue
        used = dict(result["with"])
        title = f"{cell.what} {used.pop(cell.what, cell.version)}".strip()
        title += " (free-threaded)" if cell.version.endswith("t") else ""
        others = ", ".join(f"{name} {version}" for name, version in _relevant(cell, used))
        figures = f"{result['passed']:,} | {result['skipped']} | {len(result['failed'])}"
        lines.append(
            f"| {title} | {others} | {', '.join(cell.folders)} | {figures} | {result['on']} |"
        )
        failures += [f"* {title}: `{test}`: {why}" for test, why in result["failed"].items()]
    return "\n".join([*lines, *(["", *failures] if failures else [])]) + "\n"


def _relevant(cell: Cell, used: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What was part of these tests, of all that was there."""
    others = cell.variables.get("SQLBROKER_TEST_DRIVERS", "").split(",")
    drivers = {
        "SQLite": ("sqlite", "aiosqlite"),
        "PostgreSQL": ("postgresql", "psycopg" if "psycopg" in others else "asyncpg"),
        "MariaDB": ("mariadb", "asyncmy" if "asyncmy" in others else "aiomysql"),
    }
    names = {"Python", "SQLAlchemy"}
    for database, (kind, driver) in drivers.items():
        if kind in cell.databases:
            names |= {database, driver}
    yield from ((name, version) for name, version in used.items() if name in names)


def classifiers(results: Mapping[str, Any]) -> list[str]:
    """Those of pyproject.toml that the results allow: versions of which no test has failed."""
    passed = [OWN_PYTHON]
    passed += [
        cell.version
        for cell in cells()
        if cell.what == "Python" and results.get(cell.name, {}).get("failed") == {}
    ]
    lines = [f"Programming Language :: Python :: {one}" for one in passed if not one.endswith("t")]
    if any(one.endswith("t") for one in passed):
        lines.append("Programming Language :: Python :: Free Threading :: 2 - Beta")
    return lines


def project_with(text: str, results: Mapping[str, Any]) -> str:
    """The text of pyproject.toml, with these classifiers."""
    own = re.compile(r'    "Programming Language :: Python :: (3\.\d|Free).*",\n')
    lines = "".join(f'    "{line}",\n' for line in classifiers(results))
    after = '    "Programming Language :: Python :: 3 :: Only",\n'
    return own.sub("", text).replace(after, after + lines)


def write(results: Mapping[str, Any], *, check: bool = False) -> int:
    """Bring the page and pyproject.toml up to date, or only compare; the exit code."""
    code = update_block(PAGE, "versions", table(results), check=check)
    text = PROJECT.read_text()
    wanted = project_with(text, results)
    if wanted == text:
        return code
    if check:
        print("the classifiers of pyproject.toml differ: run `just generate`")
        return 1
    PROJECT.write_text(wanted)
    return code


def read(file: Path = RESULTS) -> dict[str, Any]:
    """What was kept."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def main(arguments: list[str]) -> int:
    """The command line."""
    names, options = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        names, options = arguments[:at], arguments[at + 1 :]
    if names in (["--write"], ["--check"]):
        return write(read(), check=names == ["--check"])
    known = {cell.name: cell for cell in cells()}
    if unknown := set(names) - set(known):
        print(f"there is no {', '.join(sorted(unknown))}: choose among {', '.join(known)}")
        return 2
    servers.leave_in_order()
    problems = []
    for name in names or known:
        print(f"== {name}", flush=True)
        try:
            result = run(known[name], options)
        except MissingError as error:
            print(f"{name} is untested: {error}", flush=True)
            result = {"missing": str(error)}
            # Who names a version wants it; only one that no registry has is no failure.
            if names and not known[name].missing:
                problems.append(name)
        if result.get("failed"):
            problems.append(name)
        if not options:
            today = f"{datetime.now(UTC):%Y-%m-%d}"
            keep(name, result if "missing" in result else {**result, "on": today})
            write(read())
    print(f"failed: {', '.join(problems)}" if problems else "no test has failed")
    return int(bool(problems))


def keep(name: str, result: dict[str, Any], file: Path = RESULTS) -> None:
    """Add the result of the cell `name` to `file`, in the order of the table."""
    results = read(file)
    # What cannot be had here may have been had elsewhere: what came out there stays.
    if "missing" not in result or "with" not in results.get(name, {}):
        results[name] = result
    kept = {cell.name: results[cell.name] for cell in cells() if cell.name in results}
    file.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
