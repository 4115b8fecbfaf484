"""The list of commands: it says what each command says of itself, and imports none of them."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from faststream_sqlbroker.cli.app import GROUPS, AppGroup, ArchiveGroup, Table, app, help_of

HEAVY = ("faststream", "sqlalchemy", "pyspark", "pyspark_sqlbroker", "pydantic")
"""What the commands work with."""
HELP = f"""
import sys
from faststream_sqlbroker.cli import main
sys.argv = ["sqlbroker", *sys.argv[1:], "--help"]
try:
    main()
finally:
    sys.stderr.write(" ".join(name for name in {HEAVY} if name in sys.modules))
"""
TABLES = {"": AppGroup.table, "archive": ArchiveGroup.table}


@pytest.mark.parametrize("group", TABLES)
def test_the_help_names_every_command_and_imports_none(group: str) -> None:
    words = [group] if group else []
    done = subprocess.run(
        [sys.executable, "-c", HELP, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("│")}
    assert set(TABLES[group]) <= shown
    assert done.stderr == ""


@pytest.mark.parametrize("table", TABLES.values(), ids=["all", "archive"])
def test_the_list_says_what_the_commands_say(table: Table) -> None:
    """The first paragraph of a docstring, or the help of a group."""
    for name, place in table.items():
        module = import_module(f"faststream_sqlbroker.cli.{place}")
        command = getattr(module, name.replace("-", "_"))
        said = GROUPS[name] if isinstance(command, typer.Typer) else inspect.getdoc(command)
        text = help_of(name, place)
        assert " ".join(str(said).partition("\n\n")[0].split()) == text != "", name


@pytest.mark.parametrize("group", TABLES)
def test_every_command_has_a_help_of_its_own(group: str) -> None:
    for name in TABLES[group]:
        words = [word for word in (group, name, "--help") if word]
        done = CliRunner().invoke(app, words, env={"TERM": "dumb", "NO_COLOR": "1"})
        assert done.exit_code == 0, done.output
        assert f"{name} [OPTIONS]" in done.output


def test_a_misspelt_command_names_the_nearest() -> None:
    done = CliRunner().invoke(app, ["queuees"], env={"TERM": "dumb", "NO_COLOR": "1"})
    assert done.exit_code == 2
    assert "Did you mean 'queues'?" in done.output
