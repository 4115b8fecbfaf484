"""A lake in S3, by a session without hadoop-aws; the store is moto's server."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from deltalake import DeltaTable
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession

from faststream_sqlbroker.exceptions import SetupError, StoreError
from pyspark_sqlbroker import (
    erase_messages,
    export_archive,
    read_export,
    repair_export,
    verify_export,
)
from pyspark_sqlbroker.lake import lake as lakes
from pyspark_sqlbroker.lake import s3
from pyspark_sqlbroker.lake.delta import DeltaWriter
from pyspark_sqlbroker.lake.lake import Lake, build_lake_schema
from pyspark_sqlbroker.lake.s3 import S3Folders, build_s3_settings
from tests.helpers import eventually
from tests.spark.conftest import START, Archive
from tests.spark.test_export import of_lake, of_table
from tests.spark.test_export_races import first_exports
from tests.spark.test_repair import run

pytestmark = pytest.mark.capability("Spark: a lake in S3, of sessions without hadoop-aws")

SPAN: dict[str, Any] = {"since": "2026-03-01", "until": "2026-03-03"}
ROUNDS = 3
PATIENCE = {"request_timeout": 60, "connect_timeout": 60}
"""Seconds; PyArrow's own are few, and the server may stand still."""


@pytest.fixture
def database() -> str:
    """What is tested is the store."""
    return "sqlite"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of S3 with a bucket named `lakes`."""
    log = tmp_path_factory.mktemp("moto") / "log"
    # A process of its own: deltalake holds the interpreter's lock while it waits for an answer.
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=out,
            stderr=out,
        )

    def address() -> str | None:
        assert server.poll() is None, log.read_text()
        found = re.search(r"Running on (http://\S+:\d+)", log.read_text())
        return found[1] if found else None

    try:
        url = asyncio.run(eventually(address, 240, 0.1))
        assert url is not None
        settings = build_s3_settings(options_of(url))
        fs.S3FileSystem(**settings, **PATIENCE, allow_bucket_creation=True).create_dir("lakes")
        yield url
    finally:
        server.terminate()
        server.wait(60)


def options_of(endpoint: str) -> dict[str, str]:
    """By deltalake's names."""
    return {
        "aws_endpoint_url": endpoint,
        "aws_access_key_id": "someone",
        "aws_secret_access_key": "anything",
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
    }


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers and writers wait longer for the server, too."""
    monkeypatch.setattr(
        s3, "build_s3_settings", lambda storage: build_s3_settings(storage) | PATIENCE
    )


@pytest.fixture
def by_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same settings as variables AWS_*, which child processes have, too."""
    for name, value in options_of(endpoint).items():
        monkeypatch.setenv(name.upper(), value)


def test_from_the_first_export_to_an_erasure(
    spark: SparkSession, archive: Archive, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a task that was tried twice, and an attempt that was killed, have left."""
    path = "s3a://lakes/whole"
    options: Any = {"storage_options": options_of(endpoint)}
    store = fs.S3FileSystem(**build_s3_settings(options_of(endpoint)), **PATIENCE)
    write = S3Folders.write

    def twice(folders: S3Folders, frame: DataFrame, folder: str) -> set[str]:
        written = write(folders, frame, folder)
        for one in written:
            store.copy_file(
                folders._get_location(one), folders._get_location(f"{folder}/twice.parquet")
            )
        return written

    archive.add_days(2)
    with monkeypatch.context() as patched:
        patched.setattr(S3Folders, "write", twice)
        export_archive(spark, archive.url, path, rows_per_commit=5, **SPAN, **options)
    with store.open_output_stream("lakes/whole/data/killed/part.parquet") as stream:
        stream.write(b"half")
    archive.add({"id": 99, "archived_at": START})
    with monkeypatch.context() as patched:
        patched.setattr(lakes, "STAGED_AGE_MS", -60_000)
        export_archive(spark, archive.url, path, **SPAN, **options)
    rows = of_table(archive, START + timedelta(days=2))
    assert len(rows) == 11
    lake = Lake(spark, path, options_of(endpoint))
    assert set(lake.folders.list_files("data")) == {one.path for one in lake.files}
    assert of_lake(read_export(spark, path, **options)) == rows
    place = f"lakes/whole/{lake.files[0].path}"
    with store.open_input_stream(place) as stream:
        content = stream.read()
    with store.open_output_stream(place) as stream:
        stream.write(content[::-1])
    assert list(verify_export(spark, path, **options).damaged) == [lake.files[0].path]
    assert repair_export(spark, archive.url, path, **options).unrepaired == {}
    assert verify_export(spark, path, **options).intact
    address = "s3://lakes/whole"
    DeltaTable(address, storage_options=options_of(endpoint)).optimize.compact()
    assert len(Lake(spark, path, options_of(endpoint)).files) < len(lake.files)
    assert verify_export(spark, path, **options).intact
    erased = erase_messages(spark, archive.url, path, ids=[2, 13], dry_run=False, **options)
    assert (erased.archived, erased.lake) == (2, 2)
    left = [row for row in rows if row[0] not in {2, 13}]
    assert of_lake(read_export(spark, path, **options)) == left
    lake = Lake(spark, path, options_of(endpoint))
    assert set(lake.folders.list_files("data")) == {one.path for one in lake.files}


@pytest.mark.usefixtures("by_environment")
@pytest.mark.parametrize("name", ["prepare", "create"])
def test_of_two_first_exports_both_succeed(
    spark: SparkSession, archive: Archive, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Proves D5 in a store, too."""
    archive.add_days(1)
    path = f"s3://lakes/first-{name}"
    step = {"prepare": Lake, "create": DeltaWriter}[name], name
    first_exports(spark, archive, path, monkeypatch, step)
    rows = of_table(archive, START + timedelta(days=2))
    assert of_lake(read_export(spark, path)) == rows


@pytest.mark.usefixtures("by_environment")
def test_of_two_commits_at_once_one_is_planned_again(spark: SparkSession) -> None:
    """The store takes each version of the log once (If-None-Match)."""
    path = "s3://lakes/two"
    writer = DeltaWriter(S3Folders(path, None), None)
    writer.create(build_lake_schema("day"), {"window": "day"})
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.spark.s3_writer", path, str(ROUNDS), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    tries = []
    for _ in range(ROUNDS):
        assert [say(one) for one in processes] == ["ready", "ready"]
        answer(processes)
        tries.append(sorted(int(say(one)) for one in processes))
        answer(processes)
    assert [one.wait(60) for one in processes] == [0, 0]
    assert tries == [[1, 2]] * ROUNDS
    writer.load()
    states = list[bytes]()
    for version in range(1, 2 * ROUNDS + 1):  # each has the state of who has committed it
        writer._table = DeltaTable(path, version=version)
        states += writer.read_states()
    assert sorted(states) == [b"one"] * ROUNDS + [b"two"] * ROUNDS


def say(process: Any) -> str:
    """The next line of a process."""
    return str(process.stdout.readline()).strip()


def answer(processes: list[Any]) -> None:
    """Let all go on at the same moment."""
    for one in processes:
        one.stdin.write("\n")
        one.stdin.flush()


@pytest.mark.usefixtures("by_environment")
def test_the_command_and_what_is_refused(
    spark: SparkSession, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings come from AWS_* variables."""
    archive.add_days(1)
    path = "s3://lakes/command"
    export_archive(spark, archive.url, path, until="2026-03-02")
    result = run("verify", path)
    assert result.exit_code == 0, result.output
    with pytest.raises(SetupError, match="Spark or deltalake interprets"):
        export_archive(spark, archive.url, "s3://lakes/a b?")
    with pytest.raises(StoreError):
        export_archive(spark, archive.url, "s3://missing/lake")
