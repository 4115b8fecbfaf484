"""A person's messages leave the live table, the archive, every file of a lake, and its log."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from sqlalchemy import func, select
from typer.testing import CliRunner

from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.core.correlation import build_message_id
from faststream_sqlbroker.exceptions import ExportMismatchError, SetupError, StoreError
from pyspark_sqlbroker import (
    EraseResult,
    erase_messages,
    export_archive,
    prune_archive,
    read_export,
    verify_export,
)
from pyspark_sqlbroker.lake import erasure as module
from pyspark_sqlbroker.lake import transfer
from pyspark_sqlbroker.lake.lake import Lake
from tests.spark.conftest import START, Archive, archived
from tests.spark.kept_lakes import export_days
from tests.spark.test_export import of_lake, of_table
from tests.spark.test_records import prune, scopes

pytestmark = pytest.mark.capability(
    "Spark: messages of a person erased from the tables and the lake"
)

OF_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
DAY = timedelta(days=1)
ADA = "ada@example.org"
OF_LIVE = {"archived_at", "reason", "related_id", "error_fingerprint"}


def of_ada(number: int, day: int) -> dict[str, Any]:
    at = START + DAY * day + timedelta(hours=9)
    payload = b'{"name": "Ada Lovelace"}'
    return {"id": number, "key": ADA, "payload": payload, "archived_at": at}


def add_live(archive: Archive, number: int, *, leased: bool) -> None:
    row = archived(id=number, key=ADA)
    row = {name: value for name, value in row.items() if name not in OF_LIVE}
    lease = {
        "state": "PROCESSING",
        "lease_token": uuid.uuid4(),
        "lease_expires_at": START,
    }
    with archive.engine.begin() as connection:
        values = row | (lease if leased else {"state": "PENDING"})
        connection.execute(archive.message.insert().values(**values))


def made(spark: SparkSession, archive: Archive, path: Path) -> None:
    """Three days, of which two have a message of Ada's; one is under another policy key."""
    others = of_ada(101, 0), of_ada(102, 1) | {"key": None, "policy_key": ADA}
    export_days(spark, archive, path, *others, record_as="shop")


def erase(spark: SparkSession, archive: Archive, path: Path, **options: Any) -> EraseResult:
    given: dict[str, Any] = {"keys": [ADA], "dry_run": False} | options
    return erase_messages(spark, archive.url, str(path), **given)


def texts(path: Path) -> Iterator[str]:
    """What every file below a path says; Parquet as its rows and its footer."""
    for file in path.rglob("*"):
        if file.is_file():
            yield file.read_bytes().decode(errors="replace")
            if file.suffix == ".parquet":
                yield str(pq.read_table(file).to_pylist())
                yield str(pq.read_metadata(file).to_dict())


def holds(path: Path, word: str) -> bool:
    return any(word in text for text in texts(path))


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_the_rows_of_a_person_leave_every_database(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Of the live table, the archive and the lake; the audit, and the records for retention."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    add_live(archive, 201, leased=False)
    add_live(archive, 202, leased=True)
    for dry_run, count in ((True, 17), (False, 15)):
        done = erase(spark, archive, path, by="the data officer", dry_run=dry_run)
        assert (done.live, done.archived, done.lake, done.leased) == (1, 2, 2, (202,))
        assert archive.count() == count
    assert (holds(path, ADA), holds(path, "Lovelace")) == (False, False)
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)
    record = _audit(archive, done.audit)
    assert (record["action"], record["done"], record["skipped"]) == ("erase", 5, 1)
    assert ADA not in json.dumps(record)
    assert prune(archive).rows == 15
    archive.execute(
        "UPDATE message SET state = 'PENDING', lease_token = NULL, lease_expires_at = NULL"
    )
    last = erase_messages(None, archive.url, keys=[ADA], dry_run=False)
    assert (last.live, last.rows, last.leased) == (1, 1, ())


@OF_SQLITE
def test_nothing_of_a_person_is_left(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    """Proves D4: in files that another program has merged and in what a dead attempt has staged,
    too; figures, records and the audit agree, and the audit has no key."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    lake = Lake(spark, str(path))
    dead = path / "data" / "dead" / "_temporary"
    dead.mkdir(parents=True)
    shutil.copy(path / lake.files[0].path, dead / "part.parquet")
    os.utime(dead / "part.parquet", times=(0, 0))
    DeltaTable(str(path)).optimize.compact()
    add_live(archive, 201, leased=False)
    add_live(archive, 202, leased=True)
    assert (holds(path, ADA), holds(path, "Lovelace")) == (True, True)
    dry = erase(spark, archive, path, dry_run=True)
    assert (dry.live, dry.archived, dry.lake, dry.leased) == (1, 2, 2, (202,))
    assert archive.count() == 17
    spark.createDataFrame([], "id INT")  # makes it the active one
    done = erase(spark, archive, path, by="the data officer")
    assert SparkSession.getActiveSession() is spark
    assert (done.live, done.archived, done.lake, done.leased) == (1, 2, 2, (202,))
    assert (holds(path, ADA), holds(path, "Lovelace")) == (False, False)
    assert len(list(path.rglob("*.parquet"))) == len(Lake(spark, str(path)).files)
    assert verify_export(spark, str(path)).intact
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)
    assert archive.count() == 15
    assert [one.action for one in _export_again(spark, archive, path)] == ["unchanged"] * 3
    record = _audit(archive, done.audit)
    assert (record["action"], record["state"], record["by"]) == (
        "erase",
        "ended",
        "the data officer",
    )
    assert (record["done"], record["skipped"]) == (5, 1)
    assert ADA not in json.dumps(record)
    # Retention and pruning still know that the lake has the rest.
    assert {scopes(archive)[f"2026-03-0{day}"] for day in (1, 2, 3)} == {"lake:shop"}
    assert prune(archive).rows == 15
    archive.execute(
        "UPDATE message SET state = 'PENDING', lease_token = NULL, lease_expires_at = NULL"
    )
    last = erase(spark, archive, path)
    assert (last.live, last.rows, last.leased) == (1, 1, ())


def _export_again(spark: SparkSession, archive: Archive, path: Path) -> Any:
    return export_archive(
        spark, archive.url, str(path), since="2026-03-01", until="2026-03-04", record_as="shop"
    ).windows


def _audit(archive: Archive, key: str) -> Any:
    with archive.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT * FROM message_policy_state").mappings()
        info = [row["info"] for row in rows if row["key"] == key]
    return json.loads(info[0]) if isinstance(info[0], str) else info[0]


@OF_SQLITE
def test_a_late_row_is_not_hidden_by_the_new_figures(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """It is in no export yet: neither retention nor a prune may remove it."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    archive.add({"id": 9, "archived_at": START + timedelta(hours=2)})
    erase(spark, archive, path)
    found = prune(archive)
    assert (found.rows, len(found.differing)) == (10, 1)
    left = prune_archive(archive.url, exported=str(path), spark=spark)
    assert [one.refused is None for one in left.windows] == [False]
    assert next(one.action for one in _export_again(spark, archive, path)) == "again"
    assert verify_export(spark, str(path)).rows == 16


@OF_SQLITE
def test_an_export_that_has_read_before_brings_nothing_back(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its staged files go, its commit is refused, and it plans again."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    archive.add(of_ada(103, 3), {"id": 31, "archived_at": START + DAY * 3})
    compare = transfer._compare_checksums
    erased = list[EraseResult]()

    def while_it_compares(*given: Any) -> Any:
        if not erased:
            erased.append(erase(spark, archive, path))
        return compare(*given)

    monkeypatch.setattr(transfer, "_compare_checksums", while_it_compares)
    export_archive(spark, archive.url, str(path), until="2026-03-05")
    assert (erased[0].archived, erased[0].lake) == (3, 2)
    assert not holds(path, ADA)
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 4)


@OF_SQLITE
def test_ids_alone_a_kept_version_and_no_lake(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """With `keep` the replaced files stay for readers; a second erasure removes them."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    kept = erase(spark, archive, path, keys=(), ids=[101], keep="1h")
    assert (kept.archived, kept.lake, kept.files) == (1, 1, 0)
    assert holds(path, "Lovelace")
    gone = erase(spark, archive, path, keys=(), ids=[101])
    assert (gone.rows, gone.files) == (0, 1)
    rest = erase_messages(None, archive.url, keys=[ADA], dry_run=False)
    assert (rest.archived, rest.lake) == (1, 0)
    # What the lake alone has left is found there.
    assert erase(spark, archive, path).lake == 1
    assert not holds(path, ADA)


@OF_SQLITE
@pytest.mark.parametrize("given", [{"keys": (), "ids": [101]}, {"keys": [ADA]}], ids=["id", "key"])
def test_copies_of_a_message_go_with_it(
    spark: SparkSession,
    archive: Archive,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
) -> None:
    """Replays have made them: one is in the archive and the lake, its copy in the lake alone, and
    that one's copy in a queue. One more is made while the message is erased. Their keys differ.
    """
    path = tmp_path / "lake"
    archive.add(of_ada(101, 0), {"id": 1, "archived_at": START, "origin_id": 7})
    archive.add(of_ada(111, 0) | {"key": None, "origin_id": 101})
    archive.add(of_ada(112, 1) | {"key": "other", "origin_id": 111})
    export_archive(spark, archive.url, str(path), until="2026-03-04")
    archive.execute("DELETE FROM message_archive WHERE id = 112")
    add_live(archive, 113, leased=False)
    add_live(archive, 114, leased=False)
    archive.execute("UPDATE message SET key = 'other'")
    archive.execute("UPDATE message SET origin_id = 112 WHERE id = 113")
    dry = erase(spark, archive, path, **given, dry_run=True)
    assert (dry.live, dry.archived, dry.lake) == (1, 2, 3)
    remove = module.delete_messages

    def while_it_is_copied(*arguments: Any) -> Any:
        archive.execute("UPDATE message SET origin_id = 101 WHERE id = 114")
        return remove(*arguments)

    monkeypatch.setattr(module, "delete_messages", while_it_is_copied)
    done = erase(spark, archive, path, **given)
    assert (done.live, done.archived, done.lake) == (2, 2, 3)
    assert archive.ids() == [1]
    assert not holds(path, "Lovelace")


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_an_id_that_was_given_again_is_refused(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """The database has lost a message that the lake has, and given its id to another person's."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    archive.execute("DELETE FROM message_archive WHERE id = 101")
    add_live(archive, 101, leased=False)
    with archive.engine.begin() as connection:
        connection.execute(archive.message.update().values(key="bob@example.org"))
    of_lake = build_message_id(101, archived(**of_ada(101, 0))["created_at"])
    of_database = build_message_id(101, archived()["created_at"])
    refused: list[dict[str, Any]] = [
        {},
        {"keys": ["bob@example.org"]},
        {"keys": (), "ids": [of_lake]},
        {"keys": (), "ids": [102, of_database]},
    ]
    for given in refused:
        with pytest.raises(SetupError, match=r"several messages have the same id: \[101\]"):
            erase(spark, archive, path, **given)
    with pytest.raises(SetupError, match=r"several messages have the same id: \[101\]"):
        erase_messages(None, archive.url, ids=[of_lake])
    assert erase_messages(None, archive.url, ids=[of_database]).live == 1
    assert (archive.count(), holds(path, "Lovelace")) == (16, True)
    both = erase(spark, archive, path, ids=["101"])
    assert (both.live, both.archived, both.lake) == (1, 1, 2)


@OF_SQLITE
def test_what_cannot_be_is_refused(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lake"
    made(spark, archive, path)
    with pytest.raises(SetupError, match="give ids= or keys="):
        erase(spark, archive, path, keys=())
    with pytest.raises(SetupError, match="keys= must be non-empty strings"):
        erase(spark, archive, path, keys=[""])
    with pytest.raises(SetupError, match="path= needs spark="):
        erase_messages(None, archive.url, str(path), keys=[ADA])
    with pytest.raises(SetupError, match="no table 'typo'"):
        erase(spark, archive, path, message_table="typo")
    with monkeypatch.context() as patched:
        stage = Lake.stage
        patched.setattr(Lake, "stage", lambda *a, **kw: (stage(*a, **kw)[0], {}))
        with pytest.raises(ExportMismatchError, match="Nothing was erased"):
            erase(spark, archive, path)
    assert holds(path, ADA)
    file = path / Lake(spark, str(path)).files[0].path
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(SetupError, match="sqlbroker archive repair first"):
        erase(spark, archive, path)
    archive.execute("DROP TABLE message_archive")
    archive.execute("CREATE TABLE message_archive (id INTEGER)")
    with pytest.raises(StoreError, match="the database answered: no such column") as told:
        erase_messages(None, archive.url, keys=[ADA])
    assert ADA not in str(told.value)


@OF_SQLITE
def test_the_command(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    """Shows, asks, erases; exit code 1 while a message is leased."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    add_live(archive, 201, leased=True)
    words = ["archive", "erase", "--path", str(path), "--keys", ADA, "--ids", "5"]

    def run(*more: str, answer: str = "") -> Any:
        variables = {"COLUMNS": "200", "SQLBROKER_URL": archive.url}
        return CliRunner().invoke(app, [*words, *more], env=variables, input=answer)

    dry = run("--dry-run", "--json")
    assert (dry.exit_code, json.loads(dry.output)["archived"]) == (1, 3)
    no = run(answer="n\n")
    assert (no.exit_code, archive.count()) == (1, 17)
    assert "0 live rows, 3 archive rows and 3 export rows would be erased" in no.output
    assert isinstance(run("--json").exception, SetupError)
    done = run(answer="y\n")
    assert done.exit_code == 1
    assert "3 archive rows and 3 export rows were erased" in done.output
    assert "message 201 is leased and is not erased" in done.output
    archive.execute("DELETE FROM message")
    again = run("--yes", "--json")
    assert (again.exit_code, json.loads(again.output)["lake"]) == (0, 0)
    with archive.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(archive.archive)).scalar() == 14
