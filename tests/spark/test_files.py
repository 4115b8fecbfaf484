"""Small files next to the data, on the file systems of Hadoop."""

import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import NotSupportedError, SetupError, StoreError
from pyspark_sqlbroker.drivers import get_java
from pyspark_sqlbroker.lake import files
from pyspark_sqlbroker.lake.files import Folders, read_json, write_json


@pytest.fixture(params=["plain", "file", "viewfs", "objects"])
def place(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A folder that is not there yet: a path, a URI, one that is renamed by FileContext, an object
    store."""
    hadoop = spark._jsc.hadoopConfiguration()
    for scheme in ("viewfs", "objects"):  # each test has links of its own
        hadoop.set(f"fs.{scheme}.impl.disable.cache", "true")
    if request.param == "viewfs":
        # It stands for HDFS: its files are replaced through the same calls.
        hadoop.set("fs.viewfs.mounttable.lake.link./data", tmp_path.as_uri())
        yield "viewfs://lake/data/a/state"
        hadoop.unset("fs.viewfs.mounttable.lake.link./data")
    elif request.param == "objects":
        hadoop.set("fs.objects.impl", "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme")
        hadoop.set(
            "fs.viewfs.overload.scheme.target.objects.impl", "org.apache.hadoop.fs.LocalFileSystem"
        )
        hadoop.set("fs.viewfs.mounttable.store.link./data", tmp_path.as_uri())
        yield "objects://store/data/a/state"
        for name in (
            "objects.impl",
            "viewfs.overload.scheme.target.objects.impl",
            "viewfs.mounttable.store.link./data",
        ):
            hadoop.unset(f"fs.{name}")
    else:
        yield (
            str(tmp_path / "a" / "state")
            if request.param == "plain"
            else (tmp_path / "a" / "state").as_uri()
        )


def test_what_is_written_is_read(spark: SparkSession, place: str, tmp_path: Path) -> None:
    """A new file, one in place of another, and no other file in the folder."""
    path = f"{place}/orders.json"
    assert read_json(spark, path) is None
    for content in ({"until": None}, {"until": "größer", "rows": 2**60}, {}):
        write_json(spark, path, content)
        assert read_json(spark, path) == content
    folder = tmp_path / "a" / "state"
    assert [found.name for found in folder.iterdir() if not found.name.endswith(".crc")] == [
        "orders.json"
    ]


@pytest.mark.parametrize(
    "scheme", ["hdfs", "webhdfs", "swebhdfs", "viewfs", "abfss", "adl", "ofs", "o3fs", "s3a"]
)
def test_a_file_is_replaced_by_a_rename_if_creating_would_empty_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Servers are not at hand: what would be created where is looked at, and that Hadoop knows how
    to rename."""
    created = list[str]()
    renamed = list[Any]()
    java = get_java(spark)
    place = getattr(java, "org.apache.hadoop.fs.Path")(f"{scheme}://server/state/orders.json")
    system = SimpleNamespace(
        getUri=place.toUri,
        mkdirs=lambda _: True,
        create=lambda path, _: created.append(path.getName()) or MagicMock(),
        delete=lambda *_: True,
        getFileStatus=MagicMock(),
        listStatus=lambda _: [],
    )
    monkeypatch.setattr(files, "_open_path", lambda *_: (java, place, system))
    monkeypatch.setattr(files, "_rename_over", lambda *given: renamed.append(given[-1].getName()))
    write_json(spark, "", {})
    if scheme == "s3a":
        assert (created, renamed) == (["orders.json"], [])
        return
    assert created[0].endswith(".tmp")
    assert (len(created), renamed) == (1, ["orders.json"])
    assert spark._jsc.hadoopConfiguration().get(f"fs.AbstractFileSystem.{scheme}.impl") is not None


def test_a_reader_finds_the_old_or_the_new(spark: SparkSession, tmp_path: Path) -> None:
    """Never a part, never nothing: 40 writes and more during reads."""
    path = tmp_path / "state.json"
    write_json(spark, str(path), {"n": 0})
    done = threading.Event()
    wrong = list[str]()
    reads = list[int]()

    def look() -> None:
        while not done.is_set():
            try:
                reads.append(json.loads(path.read_text())["n"])
            except (OSError, ValueError) as error:
                wrong.append(repr(error))

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    number = 0
    deadline = time.monotonic() + 120
    while number < 40 or (
        len(set(reads)) < 3 and not wrong and reader.is_alive() and time.monotonic() < deadline
    ):
        number += 1
        write_json(spark, str(path), {"n": number, "text": "x" * 50_000})
    assert reader.is_alive()
    done.set()
    reader.join()
    assert wrong == []
    assert len(set(reads)) >= 3
    assert reads == sorted(reads)


def test_a_write_that_fails_leaves_what_was_there(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_json(spark, str(path), {"n": 1})

    def no_space(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("pyspark_sqlbroker.lake.files.bytearray", no_space, raising=False)
    with pytest.raises(OSError, match="no space left"):
        write_json(spark, str(path), {"n": 2})
    assert read_json(spark, str(path)) == {"n": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["state.json"]


def test_files_left_by_killed_writers_are_removed(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """Not what another writer, of this file or the next, may be writing."""
    folder = tmp_path / "a" / "state"
    write_json(spark, f"{place}/orders.json", {"n": 1})
    hour = 3600
    for name, age in (
        (".orders.json.0a.tmp", hour + 60),
        (".orders.json.0b.tmp", hour - 600),
        (".orders.0a.tmp", hour + 60),
        ("orders.json.0a.tmp", hour + 60),
    ):
        (folder / name).write_text("{")
        os.utime(folder / name, (time.time() - age,) * 2)
    write_json(spark, f"{place}/orders.json", {"n": 2})
    names = {found.name for found in folder.iterdir() if not found.name.endswith(".crc")}
    kept = {"orders.json", ".orders.json.0b.tmp", ".orders.0a.tmp", "orders.json.0a.tmp"}
    # Object stores have no temporary files, so nothing is looked for there.
    assert names == (kept | {".orders.json.0a.tmp"} if place.startswith("objects") else kept)
    assert read_json(spark, f"{place}/orders.json") == {"n": 2}


def test_a_file_that_is_not_a_json_object_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SetupError, match="is not a JSON object"):
        read_json(spark, str(tmp_path / "list.json"))


@pytest.mark.parametrize("kind", ["folder", "socket"])
def test_an_unreadable_file_is_not_taken_for_a_missing_one(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    """Taken for nothing, a state that its reader may not see would be begun again."""
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    else:  # as another user's file is for us: not even root can open it as a file
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    with pytest.raises(
        SetupError, match=r"/x exists but cannot be read \(.*\): give the path of a file"
    ):
        read_json(spark, str(path))


def test_a_session_without_java() -> None:
    session: Any = SimpleNamespace()
    with pytest.raises(NotSupportedError, match="Spark Connect"):
        read_json(session, "/tmp/state.json")
    with pytest.raises(NotSupportedError, match="Spark Connect"):
        write_json(session, "/tmp/state.json", {})


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_only_a_file_system_that_syncs_no_folders_is_no_error(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuses = [stat.S_ISDIR]

    def fsync(file: int) -> None:
        if any(kind(os.fstat(file).st_mode) for kind in refuses):
            raise OSError(number, "refused")

    (tmp_path / "data").write_bytes(b"x")
    monkeypatch.setattr(os, "fsync", fsync)
    folders = Folders(spark, str(tmp_path))
    if number == errno.EINVAL:
        folders.sync(["data", "another process has removed it"])
        refuses = [stat.S_ISREG]
    with pytest.raises(StoreError, match="could not be synced to disk: refused"):
        folders.sync(["data"])
