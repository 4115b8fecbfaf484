"""docs/howto/spark.md agrees with the code."""

import re
from pathlib import Path

import pytest

import pyspark_sqlbroker as spark
from faststream_sqlbroker.core.replays import REPLAY_JOB_HEADER, REPLAY_OF_HEADER
from pyspark_sqlbroker.drivers import DEBIAN_JARS, DRIVERS, JARS_VARIABLE
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, MESSAGE_FIELDS, Field
from pyspark_sqlbroker.replays.replay import REQUIRED_COLUMNS

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "howto" / "spark.md").read_text()


def table(first: str) -> list[tuple[str, ...]]:
    """The rows of the table whose first column is called `first`."""
    lines = PAGE[PAGE.index(f"| {first} |") :].partition("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def test_the_columns_are_those_of_the_data_frames() -> None:
    def row(field: Field) -> tuple[str, ...]:
        return f"`{field.name}`", field.type, "" if field.is_required else "yes", field.description

    live = [field for field in MESSAGE_FIELDS if field not in ARCHIVE_FIELDS]
    assert table("column") == [row(field) for field in (*ARCHIVE_FIELDS, *live)]
    assert [field.name for field in live] == ["lease_expires_at"]
    gone = [field.name for field in ARCHIVE_FIELDS if field not in MESSAGE_FIELDS]
    assert gone == ["archived_at", "reason", "related_id", "error_fingerprint"]


def test_the_drivers_are_those_that_are_looked_for() -> None:
    assert table("database") == [
        (
            one.database,
            f"`{one.package}`",
            f"`{one.coordinate}`",
            ".".join(map(str, one.min_version)),
        )
        for one in DRIVERS.values()
    ]
    assert JARS_VARIABLE in PAGE
    assert str(DEBIAN_JARS) in PAGE


@pytest.mark.parametrize("name", ["howto/spark.md", "tutorial/spark.md"])
def test_the_page_says_how_to_install_the_command(name: str) -> None:
    page = (DOCS / name).read_text()
    before, asked, _ = page.partition("sqlbroker spark check")
    found = re.findall(r'pip install "sqlbroker\[([\w,]+)\]"', before)
    assert asked
    assert {"cli", "spark"} <= {extra for extras in found for extra in extras.split(",")}


def test_every_public_name_is_on_the_page() -> None:
    types = {"ARCHIVE_SCHEMA", "MESSAGE_SCHEMA"}
    functions = [name for name in spark.__all__ if name[0].islower() and name not in types]
    assert len(functions) > 5
    assert [name for name in functions if f"`{name}" not in PAGE and f" {name}(" not in PAGE] == []


def test_the_options_are_those_of_the_format() -> None:
    from pyspark_sqlbroker.source.options import BATCH_OPTIONS, COMMON_OPTIONS, STREAM_OPTIONS

    told = {
        name: (of, default)
        for names, of, _meaning, default in table("option")
        for name in re.findall(r"`(\w+)`", names)
    }
    expected = {
        name: of
        for of, names in (
            ("both", COMMON_OPTIONS),
            ("batch", BATCH_OPTIONS),
            ("stream", STREAM_OPTIONS),
        )
        for name in names
    }
    assert {name: of for name, (of, _) in told.items()} == expected


def test_what_replay_needs_and_writes() -> None:
    assert f"{', '.join(REQUIRED_COLUMNS[:-1])} and {REQUIRED_COLUMNS[-1]}" in " ".join(
        PAGE.split()
    )
    for header in (REPLAY_OF_HEADER, REPLAY_JOB_HEADER):
        assert f"`{header}`" in PAGE
