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
from pyspark_sqlbroker.drivers import get_java
from pyspark_sqlbroker.lake.files import FileStatus, Folders, check_path

_SCHEMES = ("s3", "s3a", "s3n")
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_CHUNK_BYTES = 1 << 20
"""Bytes to read at once for a SHA-256."""

_MAX_TASKS = 200
"""Maximum number of tasks that read files; with more files each task reads several."""

_SETTING_NAMES = {
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
    """Open the files below a path: by Hadoop, or by PyArrow in S3 if the session has no s3a.

    Raises:
        SetupError: the path has characters that Spark or deltalake takes for something else.
        NotSupportedError: Spark Connect.
    """
    if path.partition("://")[0] in _SCHEMES and not _has_s3a(spark):
        return S3Folders(path, storage)
    return Folders(spark, path)


def _has_s3a(spark: SparkSession) -> bool:
    """Return True if the session's Java can load Hadoop's file system for S3.

    The class is in hadoop-aws, which a plain installation of PySpark lacks.
    """
    java = get_java(spark)
    if java is None:
        return True  # Folders raises the error about Spark Connect
    try:
        getattr(java, "java.lang.Class").forName(_S3A)
    except Exception:  # noqa: BLE001 - py4j wraps whatever Java raises
        return False
    return True


def build_s3_settings(storage: Mapping[str, str] | None) -> dict[str, Any]:
    """Build the arguments of PyArrow's S3 file system from deltalake's settings and AWS_*
    variables.

    Log and data must be in the same store, so one set of settings serves both libraries. Given
    settings win over variables; an endpoint's URL is split into scheme and host for PyArrow.
    """
    options = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    options |= storage or {}
    settings = dict[str, Any]()
    for name, value in options.items():
        argument = _SETTING_NAMES.get(name.lower().removeprefix("aws_"))
        if argument is not None:
            settings[argument] = value
    scheme, separator, host = settings.get("endpoint_override", "").partition("://")
    if separator:
        settings |= {"scheme": scheme, "endpoint_override": host.rstrip("/")}
    return settings


class S3Folders(Folders):
    """Files below a path of a bucket.

    Executors need PyArrow and this package; the settings are sent to them.
    """

    def __init__(self, root: str, storage: Mapping[str, str] | None) -> None:
        """Open the bucket, by deltalake's settings and the AWS_* variables, not by Spark's.

        Raises:
            SetupError: the path has characters that deltalake interprets.
        """
        self._base = root.partition("://")[2].rstrip("/")
        self.root = f"s3://{self._base}"
        check_path(self.root)
        self._settings = build_s3_settings(storage)
        self._s3 = fs.S3FileSystem(**self._settings)

    @property
    def address(self) -> str:
        """The root in deltalake's form."""
        return self.root

    def list_names(self, path: str = "") -> list[str]:
        """Return the names of a folder's entries, in order; none if there is no such folder."""
        return sorted(entry.base_name for entry in self._list_entries(path, recursive=False))

    def list_files(self, path: str) -> dict[str, FileStatus]:
        """Return all files below a folder by path; none if there is no such folder."""
        return {
            entry.path.removeprefix(f"{self._base}/"): FileStatus(
                entry.size, entry.mtime_ns // 1_000_000
            )
            for entry in self._list_entries(path, recursive=True)
            if entry.type == fs.FileType.File
        }

    def get_latest_time(self, path: str) -> int:
        """Return the time of the latest write to a file of the folder; 0 if there is none."""
        return max((status.modified for status in self.list_files(path).values()), default=0)

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with all contents, if existing."""
        location = self._get_location(path)
        with suppress(FileNotFoundError):
            if self._s3.get_file_info(location).type == fs.FileType.File:
                self._s3.delete_file(location)
            else:
                self._s3.delete_dir(location)

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hexadecimal digits; the file is read as a stream."""
        digest = hashlib.sha256()
        with self._s3.open_input_stream(self._get_location(path)) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def get_time(self) -> int:
        """Return the store's time, in milliseconds since 1970, by creating a file.

        The age of files is measured by this time, as the clock of this host may differ.
        """
        path = f"data/.{uuid.uuid4().hex}.tmp"
        try:
            with self._s3.open_output_stream(self._get_location(path)):
                pass
            # Listed like the times that it is compared with, because a request for a single file
            # returns whole seconds.
            return self.list_files("data")[path].modified
        except OSError as error:
            raise StoreError(f"{self.root} cannot be written: {error}") from error
        finally:
            self.delete(path)

    def write(self, frame: DataFrame, folder: str) -> set[str]:
        """Write rows as Parquet, a file for each partition with rows; return the paths.

        The executors write by PyArrow, and return the names of their files as rows.
        """
        schema = to_arrow_schema(frame.schema)
        task = partial(_write_task, self._settings, self._get_location(folder), schema)
        rows = frame.mapInArrow(task, "name string").collect()
        # A task that Spark has tried twice leaves another file, which is not in this result.
        return {f"{folder}/{row.name}" for row in rows}

    def read(
        self,
        session: SparkSession,
        schema: StructType,
        paths: Sequence[str],
        file_name_column: str = "",
    ) -> DataFrame:
        """Read the rows of files; `file_name_column` adds a column with the name of the file.

        Each task gets some positions in the list of files, and reads those files by PyArrow.
        """
        result_schema = StructType(
            [
                *schema.fields,
                *([StructField(file_name_column, StringType())] if file_name_column else []),
            ]
        )
        locations = [self._get_location(path) for path in paths]
        task = partial(
            _read_task, self._settings, locations, to_arrow_schema(result_schema), file_name_column
        )
        numbers = session.range(0, len(locations), 1, min(len(locations), _MAX_TASKS))
        return numbers.mapInArrow(task, result_schema)

    def _list_entries(self, path: str, *, recursive: bool) -> list[fs.FileInfo]:
        """List the entries below a path; empty if there is no such folder."""
        selector = fs.FileSelector(
            self._get_location(path), allow_not_found=True, recursive=recursive
        )
        return list(self._s3.get_file_info(selector))

    def _get_location(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base


def _write_task(
    settings: Mapping[str, Any], folder: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task to a new file; runs at an executor.

    The store shows only the complete file. Yield its name, so that the driver ignores files of
    failed attempts.
    """
    # A task without rows writes no file.
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return
    name = f"{uuid.uuid4().hex}.parquet"
    with (
        fs.S3FileSystem(**settings).open_output_stream(f"{folder}/{name}") as stream,
        pq.ParquetWriter(stream, schema, compression="zstd") as writer,
    ):
        writer.write_table(pa.Table.from_batches([first]).cast(schema))
        for batch in batches:
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
    yield pa.RecordBatch.from_pydict({"name": [name]})


def _read_task(
    settings: Mapping[str, Any],
    paths: Sequence[str],
    schema: pa.Schema,
    name: str,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Read a task's files, whose positions in `paths` the batches hold; runs at an executor.

    `name` is the column for the file's name, or empty. Missing columns are NULL.
    """
    system = fs.S3FileSystem(**settings)
    for numbers in batches:
        for number in numbers.column(0).to_pylist():
            with pq.ParquetFile(system.open_input_file(paths[number])) as file:
                for batch in file.iter_batches():
                    extra = {name: paths[number].rpartition("/")[2]} if name else {}
                    yield _to_schema(batch, schema, extra)


def _to_schema(
    batch: pa.RecordBatch, schema: pa.Schema, extra: Mapping[str, str]
) -> pa.RecordBatch:
    """Cast a batch to `schema`: missing columns take their value from `extra`, else NULL.

    Files that an older version has written lack newer columns.
    """
    columns = []
    for field in schema:
        if field.name in batch.schema.names:
            columns.append(batch.column(field.name).cast(field.type))
        else:
            value = pa.scalar(extra.get(field.name), field.type)
            columns.append(pa.repeat(value, batch.num_rows))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
