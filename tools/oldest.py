"""Run tests of each extra with the lowest versions that pyproject.toml allows.

    python -m tools.oldest [--light] [PYTEST ARGUMENTS]

The lower bound of each requirement of the package and of its extras, and what those versions need,
are installed into `.venv-oldest`. The tools of the tests come from `.venv`, which stays as it is.
`--light` leaves out what takes long to install, the tests that need it, and MySQL, whose drivers
are MariaDB's. Arguments of pytest replace the tests that are chosen here.
"""

import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.servers import VARIABLES

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-oldest"
PACKAGE = "the package"
"""In place of an extra: what is always installed."""
OWN = "dev"
"""The extra that is not installed: what works on this repository, as constraints.txt has it."""
COMPANIONS = {"opentelemetry-exporter-otlp-proto-http"}
"""Distributions of `OWN` that are installed, too: they work with one version of another only."""
LIGHT = {"spark", "spark-executor", "report", "bench", "docs"}
"""Extras that `--light` leaves out: Spark is 400 MB, and its tests start Java."""
REASONS = 15
"""Lines of pip's that are shown: those before are about downloads."""

_DRIVERS = ("contract/test_ack_first.py", "contract/test_sizes.py")
TESTS: dict[str, tuple[str, ...]] = {
    PACKAGE: ("faststream/test_bodies.py", "flow/test_worker.py"),
    "postgresql": _DRIVERS,
    "mysql": _DRIVERS,
    "sqlite": _DRIVERS,
    "psycopg": _DRIVERS,
    "asyncmy": _DRIVERS,
    "migrations": ("schema/test_autogenerate.py", "schema/test_upgrade.py"),
    "schedule": ("unit/test_cron.py",),
    "fastapi": ("faststream/test_fastapi.py",),
    "cli": ("faststream/test_schema_cli.py", "unit/test_command_list.py"),
    "arrow": ("faststream/test_archive_read.py",),
    "spark-executor": ("spark/test_databases.py", "unit/test_spark_drivers.py"),
    "spark": ("spark/test_datasource.py", "spark/test_lake.py", "spark/test_read.py"),
    "report": ("spark/test_report_page.py",),
    "http": ("http/test_users.py", "http/dashboard/test_shared.py"),
    "client": ("http/test_queue_client.py",),
    "config": ("config/test_from_yaml.py", "config/test_declared.py"),
    "prometheus": ("faststream/test_prometheus.py",),
    "otel": ("faststream/test_opentelemetry.py",),
    "demo": ("docs/test_dashboard_demo.py",),
    "bench": ("spark/test_report_page.py",),
    "docs": ("docs/test_site.py", "docs/test_examples.py"),
}
"""Tests below `tests/` that use the packages of an extra."""
OTHER_DRIVERS = ("psycopg", "asyncmy")
"""Extras whose tests run apart, with these drivers in place of the usual ones."""
QUICK = "not postgresql and not mariadb and not mysql and not pgbouncer"
"""Which tests run of those that are no driver's: on SQLite, and those without a database."""


def requirements(project: Mapping[str, Any]) -> dict[str, list[Requirement]]:
    """Return the requirements of each extra of `project`, the table of pyproject.toml."""
    extras = {PACKAGE: project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: [one for one in map(Requirement, lines) if one.name != project["name"]]
        for extra, lines in extras.items()
    }


def lower_bounds(extras: Mapping[str, Sequence[Requirement]]) -> list[str]:
    """Return a requirement of exactly the lower bound for each distribution of `extras`.

    Raises:
        ValueError: one has no lower bound, or two different ones.
    """
    versions: dict[str, tuple[str, str]] = {}
    parts: dict[str, set[str]] = {}
    for extra, named in extras.items():
        for one in named:
            lowest = [each.version for each in one.specifier if each.operator == ">="]
            if len(lowest) != 1:
                raise ValueError(f"{one} of {extra} needs one lower bound: write {one.name}>=…")
            name = canonicalize_name(one.name)
            first, version = versions.setdefault(name, (extra, lowest[0]))
            if version != lowest[0]:
                raise ValueError(
                    f"{name} is >={version} for {first} and >={lowest[0]} for {extra}: an "
                    "environment with both never has the lower one; give both the same lower bound"
                )
            parts.setdefault(name, set()).update(one.extras)
    return [
        f"{name}[{','.join(sorted(parts[name]))}]=={version}".replace("[]", "")
        for name, (_, version) in sorted(versions.items())
    ]


def install(wanted: Sequence[str], folder: Path = FOLDER, interpreter: Path | None = None) -> Path:
    """Install `wanted` into `folder`, unless it is there, and return the folder's interpreter.

    What else is needed is found in `.venv`; another `interpreter` than its own gets all, as
    constraints.txt has it.

    Raises:
        RuntimeError: they do not go together, with pip's words, which name those that conflict.
    """
    python = folder / "bin" / "python"
    stamp = folder / "stamp"
    # What is not pinned is found in `.venv`, as constraints.txt has it.
    others = hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()
    used = interpreter or Path(sys.executable)
    version = subprocess.check_output([used, "-VV"], text=True)
    stamped = "\n".join([version, others, *wanted])
    if stamp.exists() and stamp.read_text() == stamped:
        return python
    print(f"installing {len(wanted)} requirements into {folder.name} ...", flush=True)
    # Without pip: Debian's unpacked interpreters bring none.
    subprocess.run([used, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile"]
    command += ["--disable-pip-version-check", "--progress-bar=off", *wanted]
    if interpreter is None:
        # What is found there already is left there; only what lacks or differs is installed here.
        shared = _site_packages(Path(sys.executable))
        own = Path(_site_packages(python))
        (own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    else:
        command += ["-c", str(ROOT / "constraints.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        said = [*done.stdout.splitlines()[-REASONS:], *done.stderr.splitlines()[-REASONS:]]
        raise RuntimeError("\n".join([*said, f"the requirements of {folder.name} do not fit"]))
    stamp.write_text(stamped)
    return python


def _site_packages(python: Path) -> str:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def run(python: Path, tests: Sequence[str], **variables: str) -> bool:
    """Run pytest with arguments `tests`, and return whether it has passed."""
    environment = {**os.environ, **variables}
    # Each process that a test starts would compile everything anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # No test needs anyio's plugin, and an old one cannot be imported by pytest's newest.
    # What an old version uses of others may be deprecated by now.
    options = [
        "-q",
        "-rfE",
        "--continue-on-collection-errors",
        "-p",
        "no:anyio",
        "-W",
        "ignore::DeprecationWarning",
    ]
    command = [str(python), "-m", "pytest", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def paths(extras: Iterable[str]) -> list[str]:
    """Return the tests of `extras` that are no driver's, each once."""
    named = {test for extra in extras for test in TESTS[extra]}
    return [f"tests/{test}" for test in sorted(named.difference(_DRIVERS))]


def main(arguments: list[str]) -> int:
    """Install and run; return the exit code."""
    light = "--light" in arguments
    given = [one for one in arguments if one != "--light"]
    extras = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    lower_bounds(extras)  # of all: those of `OWN` must not be others
    left_out = {OWN, *(LIGHT if light else ())}
    chosen = {extra: named for extra, named in extras.items() if extra not in left_out}
    companions = [one for one in extras[OWN] if one.name in COMPANIONS]
    try:
        python = install(lower_bounds({**chosen, OWN: companions}))
    except RuntimeError as error:
        print(error)
        return 1
    if given:
        return int(not run(python, given))
    processes = ["-n", "0" if light else "2"]
    missing = {f"{VARIABLES['mysql']}_MISSING": "--light does without"} if light else {}
    drivers = [f"tests/{test}" for test in _DRIVERS]
    others = {"SQLBROKER_TEST_DRIVERS": ",".join(OTHER_DRIVERS)}
    passed = [
        run(python, [*processes, "-k", QUICK, *paths(chosen)]),
        run(python, [*processes, *drivers], **missing),
        run(python, [*processes, *drivers], **missing, **others),
    ]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
