"""A lake in S3 for sessions without Hadoop's s3a: PyArrow reads and writes its files."""

import hashlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from faststream_sqlbroker.exceptions import StoreError
from pyspark_sqlbroker.drivers import java_of
from pyspark_sqlbroker.lake.files import Folders, Found, refuse_path

_SCHEMES = ("s3", "s3a", "s3n")
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_CHUNK = 1 << 20
"""Bytes that are read at once for a SHA-256."""

_MOST_TASKS = 200
"""Files are read by so many tasks at most, several by each if there are more."""

_NAMES = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "default_region": "region",
    "region": "region",
    "endpoint": "endpoint_override",
    "endpoint_url": "endpoint_override",
}
"""PyArrow's names of deltalake's settings."""


def open_folders(spark: SparkSession, path: str, storage: Mapping[str, str] | None) -> Folders:
    """The files below a path: by Hadoop, or by PyArrow in S3 if the session has no s3a.

    Raises:
        SetupError: the path has characters that Spark or deltalake takes for something else.
        NotSupportedError: Spark Connect.
    """
    if path.partition("://")[0] in _SCHEMES and not _has_s3a(spark):
        return S3Folders(path, storage)
    return Folders(spark, path)


def _has_s3a(spark: SparkSession) -> bool:
    java = java_of(spark)
    if java is None:
        return True  # Folders says what Spark Connect cannot do
    try:
        getattr(java, "java.lang.Class").forName(_S3A)
    except Exception:  # noqa: BLE001 - py4j wraps whatever Java raises
        return False
    return True


def s3_settings(storage: Mapping[str, str] | None) -> dict[str, Any]:
    """Arguments of PyArrow's S3 file system, from deltalake's settings and from AWS_* variables."""
    given = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    given |= storage or {}
    settings = dict[str, Any]()
    for name, value in given.items():
        known = _NAMES.get(name.lower().removeprefix("aws_"))
        if known is not None:
            settings[known] = value
    scheme, found, place = settings.get("endpoint_override", "").partition("://")
    if found:
        settings |= {"scheme": scheme, "endpoint_override": place.rstrip("/")}
    return settings


class S3Folders(Folders):
    """Files below one path of a bucket.

    Executors need PyArrow and this package; the settings are sent to them.
    """

    def __init__(self, root: str, storage: Mapping[str, str] | None) -> None:
        """Raises SetupError if the path has characters that deltalake takes otherwise."""
        self._base = root.partition("://")[2].rstrip("/")
        self.root = f"s3://{self._base}"
        refuse_path(self.root)
        self._settings = s3_settings(storage)
        self._s3 = fs.S3FileSystem(**self._settings)

    @property
    def address(self) -> str:
        """The root as deltalake takes it."""
        return self.root

    def names(self, place: str = "") -> list[str]:
        """Names of what is in a folder, in order; none if there is no such folder."""
        return sorted(one.base_name for one in self._found(place, recursive=False))

    def files(self, place: str) -> dict[str, Found]:
        """All files below a folder, by their place; none if there is no such folder."""
        return {
            one.path.removeprefix(f"{self._base}/"): Found(one.size, one.mtime_ns // 1_000_000)
            for one in self._found(place, recursive=True)
            if one.type == fs.FileType.File
        }

    def newest(self, place: str) -> int:
        """When the last file of a folder was written; 0 if there is none."""
        return max((one.modified for one in self.files(place).values()), default=0)

    def delete(self, place: str) -> None:
        """Remove a file, or a folder with everything in it, if it is there."""
        at = self._at(place)
        with suppress(FileNotFoundError):
            if self._s3.get_file_info(at).type == fs.FileType.File:
                self._s3.delete_file(at)
            else:
                self._s3.delete_dir(at)

    def sha256(self, place: str) -> str:
        """The SHA-256 of a file's bytes, as hexadecimal digits; it is read as a stream."""
        digest = hashlib.sha256()
        with self._s3.open_input_stream(self._at(place)) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    def now(self) -> int:
        """Milliseconds since 1970 by the clock of the store, read from a file made for it."""
        place = f"data/.{uuid.uuid4().hex}.tmp"
        try:
            with self._s3.open_output_stream(self._at(place)):
                pass
            # Listed, as the times that it is compared with: a single request has whole seconds.
            return self.files("data")[place].modified
        except OSError as error:
            raise StoreError(f"{self.root} cannot be written: {error}") from error
        finally:
            self.delete(place)

    def write(self, frame: DataFrame, folder: str) -> set[str]:
        """Write rows as Parquet, a file for each partition that has some; returns their places."""
        schema = to_arrow_schema(frame.schema)
        task = partial(_write, self._settings, self._at(folder), schema)
        rows = frame.mapInArrow(task, "name string").collect()
        # A task that Spark has tried twice leaves a file more, which is none of these.
        return {f"{folder}/{row.name}" for row in rows}

    def read(
        self, session: SparkSession, schema: StructType, places: Sequence[str], name: str = ""
    ) -> DataFrame:
        """The rows of files; with `name` a column of it has the name of the file."""
        wanted = StructType([*schema.fields, *([StructField(name, StringType())] if name else [])])
        paths = [self._at(one) for one in places]
        task = partial(_read, self._settings, paths, to_arrow_schema(wanted), name)
        numbers = session.range(0, len(paths), 1, min(len(paths), _MOST_TASKS))
        return numbers.mapInArrow(task, wanted)

    def _found(self, place: str, *, recursive: bool) -> list[fs.FileInfo]:
        selector = fs.FileSelector(self._at(place), allow_not_found=True, recursive=recursive)
        return list(self._s3.get_file_info(selector))

    def _at(self, place: str) -> str:
        return f"{self._base}/{place}" if place else self._base


def _write(
    settings: Mapping[str, Any], folder: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write what one task has, at an executor; the store shows the file when it is whole."""
    first = next((one for one in batches if one.num_rows), None)
    if first is None:
        return
    name = f"{uuid.uuid4().hex}.parquet"
    with (
        fs.S3FileSystem(**settings).open_output_stream(f"{folder}/{name}") as stream,
        pq.ParquetWriter(stream, schema, compression="zstd") as writer,
    ):
        writer.write_table(pa.Table.from_batches([first]).cast(schema))
        for one in batches:
            writer.write_table(pa.Table.from_batches([one]).cast(schema))
    yield pa.RecordBatch.from_pydict({"name": [name]})


def _read(
    settings: Mapping[str, Any],
    paths: Sequence[str],
    schema: pa.Schema,
    name: str,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Read the files of one task's numbers, at an executor; missing columns are NULL."""
    system = fs.S3FileSystem(**settings)
    for numbers in batches:
        for number in numbers.column(0).to_pylist():
            with pq.ParquetFile(system.open_input_file(paths[number])) as file:
                for one in file.iter_batches():
                    extra = {name: paths[number].rpartition("/")[2]} if name else {}
                    yield _shaped(one, schema, extra)


def _shaped(batch: pa.RecordBatch, schema: pa.Schema, extra: Mapping[str, str]) -> pa.RecordBatch:
    columns = []
    for field in schema:
        if field.name in batch.schema.names:
            columns.append(batch.column(field.name).cast(field.type))
        else:
            value = pa.scalar(extra.get(field.name), field.type)
            columns.append(pa.repeat(value, batch.num_rows))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
