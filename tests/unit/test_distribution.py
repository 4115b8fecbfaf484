"""Another distribution that owns files of this package is reported where it is met: at a start."""

import logging
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import faststream_sqlbroker
from faststream_sqlbroker import SqlBroker, cli
from faststream_sqlbroker.broker import startup_warnings
from faststream_sqlbroker.core import distribution
from faststream_sqlbroker.core.distribution import DISTRIBUTION, get_shared_files_warning

OURS = f"{DISTRIBUTION}-0.1.0"
OTHER = "faststream_sqlbroker-0.1.0a11"


def install(site: Path, name: str, *files: str) -> None:
    """Write the files of a distribution as pip does."""
    folder = site / f"{name}.dist-info"
    folder.mkdir()
    title, _, number = name.partition("-")
    (folder / "METADATA").write_text(f"Name: {title.replace('_', '-')}\nVersion: {number}\n\n")
    (folder / "RECORD").write_text("".join(f"{file},sha256=abc,1\n" for file in files))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    install(tmp_path, OURS, "../../../bin/sqlbroker", "faststream_sqlbroker/__init__.py")
    install(tmp_path, "faststream-0.7.8", "faststream/__init__.py", "faststream/a.py")
    return tmp_path / "faststream_sqlbroker"


def test_the_distribution_is_installed_by_its_name() -> None:
    assert version(DISTRIBUTION)


def test_an_environment_of_its_own_has_nothing_to_report(package: Path) -> None:
    assert get_shared_files_warning(package) is None


def test_a_distribution_that_lists_our_files_is_named(package: Path) -> None:
    install(package.parent, OTHER, "faststream_sqlbroker/__init__.py")
    assert get_shared_files_warning(package) == (
        "faststream-sqlbroker 0.1.0a11 also owns files of the package 'faststream_sqlbroker': the "
        "later installation has overwritten files of the earlier. Install sqlbroker into its own "
        "environment"
    )


@pytest.mark.parametrize(
    "file", ["other/faststream_sqlbroker/a.py", "_editable_impl_faststream_sqlbroker.pth"]
)
def test_files_that_only_look_like_ours_are_left_alone(package: Path, file: str) -> None:
    install(package.parent, OTHER, file)
    assert get_shared_files_warning(package) is None


def test_the_installed_distributions_are_read_once(package: Path) -> None:
    assert get_shared_files_warning(package) is None
    install(package.parent, OTHER, "faststream_sqlbroker/__init__.py")
    assert get_shared_files_warning(package) is None


@pytest.fixture
def mixed(package: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text about an environment in which two distributions share our folder."""
    install(package.parent, OTHER, "faststream_sqlbroker/__init__.py")
    text = get_shared_files_warning(package)
    assert text
    for module in (startup_warnings, cli):
        monkeypatch.setattr(module, "get_shared_files_warning", lambda: text)
    return text


async def test_the_broker_warns_at_its_start(
    mixed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = SqlBroker(f"sqlite+aiosqlite:///{tmp_path}/a.db", logger=logging.getLogger("mixed"))
    await broker.create_tables()
    with caplog.at_level(logging.WARNING, "mixed"):
        async with broker:
            await broker.start()
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [mixed]


def test_the_command_warns_before_it_loads_the_rest(
    mixed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest may be a mixture that cannot even be imported."""
    monkeypatch.setitem(sys.modules, "faststream_sqlbroker.cli.app", ModuleType("mixture"))
    with pytest.raises(ImportError):
        cli.main()
    assert capsys.readouterr().err == f"warning: {mixed}\n"


def test_nothing_is_reported_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert Path(faststream_sqlbroker.__file__).parent == distribution._PACKAGE
    assert get_shared_files_warning() is None
