"""A lake under a name: a view without Delta's jars, and the SQL of the table with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import export_archive, register_export
from pyspark_sqlbroker.lake import reading
from tests.spark.conftest import Archive

OF_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@pytest.fixture
def lake(spark: SparkSession, archive: Archive, tmp_path: Path) -> Iterator[str]:
    """Two days of an archive that has three."""
    archive.add_days(3)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-03")
    yield path
    spark.catalog.dropTempView("shop_messages")


@OF_SQLITE
def test_a_session_without_jars_gets_a_view(
    spark: SparkSession, archive: Archive, lake: str
) -> None:
    """It is made of the files of now: the second call shows the third day, too."""

    def rows() -> Any:
        return [
            (str(row[0]), row[1])
            for row in spark.sql(
                "SELECT date, count(*) FROM shop_messages GROUP BY date ORDER BY date"
            ).collect()
        ]

    assert register_export(spark, lake, "shop_messages") == "view"
    assert rows() == [("2026-03-01", 5), ("2026-03-02", 5)]
    export_archive(spark, archive.url, lake, until="2026-03-04")
    assert len(rows()) == 2
    assert register_export(spark, lake, "shop_messages") == "view"
    assert rows() == [("2026-03-01", 5), ("2026-03-02", 5), ("2026-03-03", 5)]


class SqlAnswers:
    """In place of a session with Delta's jars: keeps statements, and says where a table is."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.statements: list[str] = []

    def sql(self, statement: str) -> "SqlAnswers":
        self.statements.append(statement)
        return self

    def collect(self) -> list[dict[str, str]]:
        return [{"location": self.location}]


@pytest.fixture
def answers(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SqlAnswers]:
    said = SqlAnswers(f"file://{tmp_path}/lake/")
    with monkeypatch.context() as patch:
        patch.setattr(reading, "has_delta", lambda _spark: True)
        patch.setattr(spark, "sql", said.sql)
        yield said


@OF_SQLITE
def test_a_session_with_jars_gets_a_table(
    spark: SparkSession, lake: str, answers: SqlAnswers
) -> None:
    assert register_export(spark, lake, "main.shop.messages") == "table"
    assert answers.statements == [
        f"CREATE TABLE IF NOT EXISTS `main`.`shop`.`messages` USING delta LOCATION 'file:{lake}'",
        "DESCRIBE DETAIL `main`.`shop`.`messages`",
    ]


@OF_SQLITE
def test_a_table_of_another_path_is_refused(
    spark: SparkSession, lake: str, answers: SqlAnswers
) -> None:
    answers.location = "file:/elsewhere"
    with pytest.raises(SetupError, match="is a table of file:/elsewhere, and not of"):
        register_export(spark, lake, "messages")


@OF_SQLITE
def test_a_path_with_a_quote_stays_one_literal(
    spark: SparkSession, archive: Archive, tmp_path: Path, answers: SqlAnswers
) -> None:
    archive.add_days(1)
    path = f"{tmp_path}/ada's lake"
    export_archive(spark, archive.url, path)
    answers.location = f"file:{path}"
    assert register_export(spark, path, "messages") == "table"
    assert answers.statements[0].endswith(f"LOCATION 'file:{tmp_path}/ada\\'s lake'")


@pytest.mark.parametrize("name", ["", "a-b", "a b", "a.b.c.d", "a..b", "`a`", "a; DROP TABLE b"])
def test_names_that_cannot_be_are_refused(spark: SparkSession, name: str) -> None:
    with pytest.raises(SetupError, match="name cannot be"):
        register_export(spark, "/lake/none", name)


def test_a_view_has_no_schema_and_needs_an_export(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="a temporary view, and that has no schema"):
        register_export(spark, str(tmp_path), "shop.messages")
    with pytest.raises(SetupError, match="has no table: give the path of an export"):
        register_export(spark, str(tmp_path), "messages")
