"""`sqlbroker archive …`, in process; `test_export_killed.py` kills it as a process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from typer.main import get_command
from typer.testing import CliRunner

from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.exceptions import SetupError, StoreError
from tests.spark.conftest import Archive

OF_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
ROOT = Path(__file__).parent.parent.parent
MAIN = "from faststream_sqlbroker.cli import main; main()"


def run(*words: str, **variables: str) -> Any:
    """The command in this process; wide enough for a table."""
    return CliRunner().invoke(app, ["archive", *words], env={"COLUMNS": "200", **variables})


def lines(output: str) -> list[list[str]]:
    """Rows of the printed tables of windows, as words."""
    return [line.split() for line in output.splitlines() if re.match(r"\d{4}-\d\d-\d\d ", line)]


@pytest.mark.parametrize("command", ["export --path x", "replay --job x", "report --out x.html"])
def test_a_missing_database_is_one_line(spark: SparkSession, tmp_path: Path, command: str) -> None:
    words = [str(tmp_path / word) if word.startswith("x") else word for word in command.split()]
    done = run(*words, SQLBROKER_URL="postgresql://user:s3cr3t@127.0.0.1:1/x")
    assert isinstance(done.exception, StoreError)
    assert str(done.exception).startswith("the database answered: ")
    assert "s3cr3t" not in str(done.exception)


@OF_SQLITE
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("report --out x.html --path /none", "Path does not exist: file:/none"),
        ("replay --job x --path /none", "Path does not exist: file:/none"),
        (
            "export --path /proc/nope",
            "the Delta table at file:/proc/nope cannot be read or written: ",
        ),
    ],
)
def test_an_error_of_spark_is_one_line(
    spark: SparkSession, archive: Archive, tmp_path: Path, command: str, words: str
) -> None:
    done = run(
        *command.replace("x.html", str(tmp_path / "x.html")).split(), SQLBROKER_URL=archive.url
    )
    assert isinstance(done.exception, StoreError)
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "status file:",
        "verify",
        "repair",
        "prune --exported",
        "erase --key k --path",
        "replay --job x --path",
        "report --out x.html --path",
    ],
)
def test_a_missing_folder_starts_no_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def start(**_options: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("pyspark_sqlbroker.build_session", start)
    monkeypatch.delenv("SPARK_CONF_DIR")  # of the tests; it could name a place for all paths
    separator = "" if command.endswith(":") else " "
    words = f"{command}{separator}{tmp_path}/none".split()
    done = run(*words, SQLBROKER_URL="sqlite:///none.db")
    assert isinstance(done.exception, SetupError)
    assert f"{tmp_path}/none does not exist: give the path of an export" in str(done.exception)


def test_sparks_errors_tell_no_password() -> None:
    with pytest.raises(StoreError) as told, convert_database_errors():
        raise AnalysisException(
            "Path does not exist: s3a://key:s3c/r3t@bucket/lake, \x1b[2J\n  at line 2"
        )
    assert str(told.value) == "Spark answered: Path does not exist: s3a://bucket/lake, \ufffd[2J"


@pytest.mark.parametrize(
    "command", ["report --out x.html --table", "replay --job x --archive-table"]
)
def test_a_missing_table_is_named(
    spark: SparkSession, archive: Archive, tmp_path: Path, command: str
) -> None:
    words = command.replace("x.html", str(tmp_path / "x.html")).split()
    done = run(*words, "typo", SQLBROKER_URL=archive.url)
    assert isinstance(done.exception, SetupError)
    assert str(done.exception).startswith("there is no table 'typo' in the database ")


@OF_SQLITE
def test_an_empty_archive(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    path = str(tmp_path / "lake")
    for done in (run("export", "--path", path, SQLBROKER_URL=archive.url), run("status", path)):
        assert (done.exit_code, done.exception) == (0, None)
        assert "the export has no windows" in done.output
        assert "None" not in done.output


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_export_status_and_prune(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    """Proves D4 and M5 as an operator sees them; no password is printed."""
    archive.add_days(4)
    path = str(tmp_path / "lake")
    named = ["--source", "the shop"]
    days = ["--since", "2026-03-01", "--until", "2026-03-04"]
    done = run("export", "--path", path, *days, *named, SQLBROKER_URL=archive.url)
    assert (done.exit_code, done.exception) == (0, None)
    assert [line[:3] for line in lines(done.output)] == [
        [f"2026-03-0{day}", "exported", "5"] for day in (1, 2, 3)
    ]
    assert "15 rows written" in done.output
    # A path in pieces could not be copied.
    narrow = run("status", path, COLUMNS="40").output.splitlines()
    assert any(line.endswith(path) for line in narrow)
    assert any(line.startswith("source: kind ") for line in narrow)
    status = run("status", path)
    assert "is complete up to 2026-03-04 00:00:00+00:00; 15 rows" in status.output
    assert [line[:2] for line in lines(status.output)] == [
        [f"2026-03-0{day}", "5"] for day in (1, 2, 3)
    ]
    archive.execute("UPDATE message_archive SET id = 77 WHERE id = 12")
    dry = run(
        "prune",
        "--url",
        archive.url,
        "--exported",
        path,
        "--older-than",
        "1d12h",
        *named,
        "--dry-run",
    )
    assert (dry.exit_code, archive.count()) == (1, 20)
    assert "10 rows would be removed; 1 window refused" in dry.output
    wet = run("prune", "--exported", path, *named, SQLBROKER_URL=archive.url)
    assert (wet.exit_code, archive.count()) == (1, 10)
    assert re.search(r"2026-03-02 .* refused: 1 of its rows are not in the export", wet.output)
    secret = archive.engine.url.password
    printed = "".join(one.output + one.stderr for one in (done, status, dry, wet))
    assert secret is None or secret not in printed


@OF_SQLITE
def test_by_age_and_what_is_refused(archive: Archive, tmp_path: Path) -> None:
    archive.add_days(4)
    gone = run("prune", "--url", archive.url, "--older-than", "30d")
    assert (gone.exit_code, archive.count()) == (0, 0)
    assert "20 rows removed; 0 windows refused" in gone.output
    for words, message in (
        (["prune", "--url", archive.url], "give --exported, --older-than (like '720h'), or both"),
        (["erase", "--url", archive.url, "--yes"], "give --id or --key of the messages"),
        (["prune", "--url", archive.url, "--older-than", "30 days"], "--older-than cannot be"),
        (["prune", "--url", archive.url, "--older-than", "2d3"], "--older-than cannot be"),
    ):
        refused = run(*words)
        assert isinstance(refused.exception, SetupError)
        assert str(refused.exception).startswith(message)
    archive.execute("DROP TABLE message_archive")
    broken = run("prune", "--url", archive.url, "--older-than", "1d")
    assert isinstance(broken.exception, StoreError)
    assert str(broken.exception) == "the database answered: no such table: message_archive"


def test_errors_are_one_line_without_the_password() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "archive", "prune", "--older-than", "1d"],
        env=os.environ | {"SQLBROKER_URL": "postgresql://me:geheim@127.0.0.1:1/none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the database answered: ")
    assert "geheim" not in done.stdout + done.stderr
    assert done.stderr.count("\n") == 1


LAKE_PAGE = (ROOT / "docs" / "howto" / "lake.md").read_text()
DOCUMENTED = {
    name: (bool(code.strip()), bool(window.strip()))
    for name, code, window in re.findall(
        r"^\| `archive (\w+)` \|(.*?)\|(.*?)\|$", LAKE_PAGE, re.MULTILINE
    )
}


def test_every_archive_command_is_in_the_table_of_the_docs() -> None:
    """Each has --json, and the window and exit code that the page says."""
    listed = get_command(app).commands["archive"].commands  # type: ignore[attr-defined]
    assert set(listed) == set(DOCUMENTED)
    for name, command in ((name, each.load()) for name, each in listed.items()):
        options = {word for one in command.params for word in one.opts}
        code, window = DOCUMENTED[name]
        assert "--json" in options, name
        assert ({"--since", "--until"} <= options) is window, name
        assert not {"--to", "--from"} & options, name
        assert ("exit code is 1" in " ".join(command.help.split())) is code, name


def test_commands_print_json(spark: SparkSession, new_database: Any, tmp_path: Path) -> None:
    archive = new_database("sqlite")
    archive.add_days(2)
    path = str(tmp_path / "lake")

    def said(*words: str) -> Any:
        done = run(*words, "--json", SQLBROKER_URL=archive.url)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    exported = said("export", "--path", path)
    assert sum(one["rows"] for one in exported["windows"]) == 10
    status = said("status", path)
    assert (status["rows"], [one["rows"] for one in status["windows"]]) == (10, [5, 5])
    assert status["watermark"] is not None
    assert said("prune", "--exported", path, "--dry-run")["rows"] == 10
    replayed = said("replay", "--job", "j", "--path", path, "--id", "1", "--yes")
    assert (replayed["messages"], replayed["queues"]) == (1, {"orders": 1})
    refused = run("replay", "--job", "k", "--path", path, "--json", SQLBROKER_URL=archive.url)
    assert "--json cannot ask for confirmation: add --yes" in str(refused.exception)
    page = tmp_path / "page.html"
    assert said("report", "--out", str(page), "--path", path) == {"written": str(page)}
