"""The wheel, in an environment that has nothing else and does not see the checkout: it holds every
file of both packages, and README's example and the command run.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.reader import ROOT, ship_an_order

PACKAGES = ("faststream_sqlbroker", "pyspark_sqlbroker")
ENV = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""Without PYTHONPATH, which would lead to the checkout."""
pytestmark = pytest.mark.timeout(1800)  # downloads, on a machine that may be busy


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=ENV | variables,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


class Environment(NamedTuple):
    """A virtual environment, and the wheel that it gets."""

    folder: Path
    wheel: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def install(self, extra: str) -> None:
        pip(
            *("--python", self.python, "install", "--no-compile"),
            *("-c", str(ROOT / "constraints.txt"), f"{self.wheel}[{extra}]"),
            folder=self.folder,
        )


def pip(*arguments: str, folder: Path) -> None:
    done = run(sys.executable, "-m", "pip", "-q", *arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What README's commands make."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT), folder=folder)
    [wheel] = folder.glob("*.whl")
    environment = Environment(folder / "venv", wheel)
    # The pip that runs the tests installs: one of its own would take seconds to make.
    venv.create(environment.folder, symlinks=True)
    environment.install("sqlite")
    return environment


def files(packages: Iterable[Path]) -> set[str]:
    return {
        path.relative_to(package.parent).as_posix()
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


def test_every_file_of_both_packages_is_installed(environment: Environment) -> None:
    """Statements, templates, scripts, styles, `py.typed`, and all modules."""
    [site_packages] = environment.folder.glob("lib/python*/site-packages")
    there = files(ROOT / package for package in PACKAGES)
    assert {Path(name).suffix for name in there} >= {".py", ".sql", ".html", ".css", ".js"}
    installed = files(site_packages / package for package in PACKAGES)
    assert there - installed == set(), "the wheel lacks these"
    assert installed - there == set(), "these are in the wheel only"


def test_both_packages_are_imported_from_there(environment: Environment, tmp_path: Path) -> None:
    """Also without Spark: it imports the readers before any name of theirs is asked for."""
    code = (
        f"import {', '.join(PACKAGES)}; print({'.__file__, '.join(PACKAGES)}.__file__, sep='\\n')"
    )
    done = run(environment.python, "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    places = [Path(line) for line in done.stdout.splitlines()]
    assert [place.parent.name for place in places] == list(PACKAGES)
    assert all(place.is_relative_to(environment.folder) for place in places)


async def test_the_readmes_example_ships_its_order(
    environment: Environment, tmp_path: Path
) -> None:
    assert f'"dist/{environment.wheel.name}[sqlite]"' in (ROOT / "README.md").read_text()
    await ship_an_order(tmp_path, python=environment.python, env={**ENV, "PYTHONUNBUFFERED": "1"})


def test_the_command_shows_its_help(environment: Environment, tmp_path: Path) -> None:
    environment.install("cli")
    command = str(environment.folder / "bin" / "sqlbroker")
    done = run(command, "--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout
