"""Which database a state belongs to: databases of one name at different addresses are different."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import export_archive, prune_archive, read_export
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.load.selection import (
    ARCHIVE,
    check_same_source,
    describe_source,
    select_rows,
)
from tests.spark.conftest import Archive
from tests.spark.test_export import MARCH

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)


def described(url: str, name: str | None = None, queues: list[str] | None = None) -> dict[str, Any]:
    """The source of all rows, or those of some queues."""
    return describe_source(parse_address(url), select_rows(ARCHIVE, queues=queues), name)


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (
            "postgresql://me:s3cr3t@a/shop",
            "postgresql+asyncpg://you@a:5432/shop",
            "postgresql://me@b/shop",
        ),
        ("mysql://me:s3cr3t@a/shop", "mysql+aiomysql://you@a:3306/shop", "mysql://me@a:3307/shop"),
        ("sqlite:////f/shop.db", "sqlite+aiosqlite:////f/g/../shop.db", "sqlite:////g/shop.db"),
    ],
)
def test_databases_of_one_name_are_distinguished_by_their_address(
    one: str, same: str, other: str
) -> None:
    """By neither driver nor user; a name that is given stands for all addresses."""
    assert described(one) == described(same)
    assert "s3cr3t" not in str(described(one))
    with pytest.raises(
        SetupError,
        match=r"^x is the state of other rows: its database is '.*', but '.*' was requested; "
        r"stop \(set source=",
    ):
        check_same_source("x is the state", described(one), described(other), "stop")
    assert described(one, "shop") == described(other, "shop") != described(one)
    check_same_source(
        "x is the state", described(one, queues=["b", "a"]), described(one, queues=["a", "b"]), ""
    )


def test_a_lake_takes_one_database(spark: SparkSession, tmp_path: Path) -> None:
    """Proves D4: not another of the same name; under a name that is given it may have several
    addresses."""
    places = (tmp_path / "production", tmp_path / "staging")
    for place in places:
        place.mkdir()
    shop, staging = (Archive(f"sqlite:///{place}/shop.db") for place in places)
    for number, archive in enumerate((shop, staging), 1):
        archive.add({"id": number, "archived_at": MARCH + timedelta(hours=number)})
    lake = str(tmp_path / "lake")
    given: dict[str, Any] = {"since": MARCH, "until": "2026-03-08", "verify": "counts"}
    export_archive(spark, shop.url, lake, **given)
    with pytest.raises(
        SetupError,
        match=r"its database is '.*production/shop.db', but "
        r"'.*staging/shop.db' was requested; give each",
    ):
        export_archive(spark, staging.url, lake, **given)
    with pytest.raises(
        SetupError, match="nothing was removed: give the path of the export of this archive"
    ):
        prune_archive(staging.url, exported=lake, spark=spark)
    assert [row.id for row in read_export(spark, lake).collect()] == [1]
    named = str(tmp_path / "named")
    export_archive(spark, shop.url, named, source="the shop", **given)
    (places[0] / "shop.db").rename(tmp_path / "moved.db")
    moved = f"sqlite:///{tmp_path}/moved.db"
    again = export_archive(spark, moved, named, source="the shop", **given)
    assert [one.action for one in again.windows] == ["unchanged"]
    with pytest.raises(SetupError, match=r"its database is 'the shop', but '.*' was requested"):
        export_archive(spark, moved, named, **given)
    assert prune_archive(moved, exported=named, spark=spark, source="the shop").rows == 1
    assert staging.count() == 1
