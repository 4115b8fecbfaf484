"""Files through Hadoop's FileSystem, on local disks, HDFS and object stores alike.

`Folders` reads and writes the files of a lake. Small JSON files stand next to the data; see
`write_json` for how safe a write is on each file system.
"""

import errno
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from faststream_sqlbroker.exceptions import NotSupportedError, SetupError, StoreError
from pyspark_sqlbroker.drivers import get_java
from pyspark_sqlbroker.store_errors import convert_store_errors

T = TypeVar("T")

RENAME_SCHEMES = ("hdfs", "webhdfs", "swebhdfs", "viewfs", "abfs", "abfss", "adl", "ofs", "o3fs")
"""Schemes where a rename replaces the target atomically; an object store shows a file only when it
is closed.
"""

TEMPORARY_AGE_MS = 3_600_000
"""Milliseconds after which the writer of a temporary file counts as dead."""

_UNSAFE_CHARACTERS = re.compile(r"[][{}*?#\\]|%[0-9A-Fa-f]{2}")
"""Characters that Spark or deltalake interpret: Spark takes brackets, * and ? for patterns;
deltalake reads # and ? as parts of a URL, a backslash as a slash, and %20 as a space.
"""

_IGNORED_SYNC_ERRORS = {errno.EACCES, errno.EBADF, errno.EINVAL}
"""Errors of folders that this user may not read, or whose file system cannot sync folders."""

_SCHEMES = {"s3a": "s3", "s3n": "s3"}
"""Deltalake's names of Hadoop's schemes, where they differ."""


@dataclass(frozen=True)
class FileStatus:
    """Size and time of a file.

    Attributes:
        size: In bytes.
        modified: Milliseconds since 1970, by the clock of the file system.
    """

    size: int
    modified: int


class Folders:
    """Files and folders below a path."""

    _local = False

    def __init__(self, spark: SparkSession, root: str) -> None:
        """Open the file system of `root`.

        A local file system is used without Hadoop's .crc files, which would turn an altered file
        into an error of Java.
        """
        self._java, self._root, self._system = _open_path(spark, root)
        self._path: Any = getattr(self._java, "org.apache.hadoop.fs.Path")
        scheme = str(self._system.getUri().getScheme())
        self._local = scheme == "file"
        self._flat = not self._local and scheme not in RENAME_SCHEMES
        self.root = str(self._root.toString())
        check_path(self.root)

    @property
    def address(self) -> str:
        """The root in deltalake's form: a local path, or a URL with deltalake's scheme."""
        uri = self._root.toUri()
        scheme = str(uri.getScheme())
        if self._local:
            return str(uri.getPath())
        return self.root.replace(scheme, _SCHEMES.get(scheme, scheme), 1)

    def get_full_path(self, path: str) -> str:
        """Return the full path of `path`."""
        return f"{self.root}/{path}"

    def list_names(self, path: str = "") -> list[str]:
        """Return the names of a folder's entries, in order; none if there is no such folder."""
        location = self._get_location(path)
        if not self._system.exists(location):
            return []
        return sorted(str(entry.getPath().getName()) for entry in self._system.listStatus(location))

    def list_files(self, path: str) -> dict[str, FileStatus]:
        """Return all files below a folder by path; none if there is no such folder.

        Paths are relative to the root.
        """
        files = dict[str, FileStatus]()
        start = len(str(self._root.toUri().getPath()).rstrip("/")) + 1
        pending = [self._get_location(path)]
        while pending:
            for entry in self._iter_entries(pending.pop()):
                if entry.isDirectory():
                    pending.append(entry.getPath())
                    continue
                name = str(entry.getPath().toUri().getPath())[start:]
                files[name] = FileStatus(int(entry.getLen()), int(entry.getModificationTime()))
        return files

    def get_latest_time(self, path: str) -> int:
        """Return the time of the latest write below a folder; 0 if the folder is gone.

        Tells folders of attempts that still write from folders of dead processes. A folder without
        files has a time, too, except in an object store. In milliseconds since 1970.
        """
        location = self._get_location(path)
        if not self._system.exists(location):
            return 0
        timestamps = [int(self._system.getFileStatus(location).getModificationTime())]
        pending = [location]
        while pending:
            for entry in self._iter_entries(pending.pop()):
                timestamps.append(int(entry.getModificationTime()))
                if entry.isDirectory():
                    pending.append(entry.getPath())
        return max(timestamps)

    def _iter_entries(self, folder: Any) -> Iterator[Any]:
        """Yield the entries of a folder; in an object store all files below, by a single request.

        A folder that was removed in the meantime has no entries.
        """
        try:
            if self._flat:
                entries = self._system.listFiles(folder, True)
                while entries.hasNext():
                    yield entries.next()
            else:
                # Race: listFiles fails if files go while it runs, and other attempts remove theirs.
                yield from self._system.listStatus(folder)
        except Py4JJavaError as error:
            if not _is_missing(error):
                raise

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with all contents, if existing."""
        self._system.delete(self._get_location(path), True)

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hexadecimal digits; the file is read as a stream.

        Java reads and hashes the file, so that its bytes need not pass through Python.
        """
        stream = self._system.open(self._get_location(path))
        try:
            digest = getattr(self._java, "org.apache.commons.codec.digest.DigestUtils")
            return str(digest.sha256Hex(stream))
        finally:
            stream.close()

    def get_time(self) -> int:
        """Return the file system's time, in milliseconds since 1970, by creating a file.

        The age of files is measured by this time, as the clock of this host may differ from that of
        the file system.
        """
        probe = self._get_location(f"data/.{uuid.uuid4().hex}.tmp")
        try:
            self._system.create(probe, True).close()
            return int(self._system.getFileStatus(probe).getModificationTime())
        except Py4JJavaError as error:
            msg = f"{self.root} cannot be written: {error.java_exception.getMessage()}"
            raise StoreError(msg) from error
        finally:
            with suppress(Py4JJavaError):
                self._system.delete(probe, False)

    def write(self, frame: DataFrame, folder: str) -> set[str]:
        """Write rows as Parquet to a folder; return the paths of the files."""
        frame.write.option("compression", "zstd").parquet(self.get_full_path(folder))
        return {path for path in self.list_files(folder) if path.endswith(".parquet")}

    def read(
        self,
        session: SparkSession,
        schema: StructType,
        paths: Sequence[str],
        file_name_column: str = "",
    ) -> DataFrame:
        """Read the rows of files; `file_name_column` adds a column with the name of the file.

        The schema is given, so that Spark opens no file before the rows are needed.
        """
        frame = session.read.schema(schema).parquet(*(self.get_full_path(path) for path in paths))
        return (
            frame.select("*", F.col("_metadata.file_name").alias(file_name_column))
            if file_name_column
            else frame
        )

    def sync(self, paths: Iterable[str]) -> None:
        """Flush files, contents of folders, and all parent folders to the local disk.

        The files that executors have written are in the cache of this host, too, if the path is one
        of its disks. Elsewhere nothing is done: object stores keep a file once it is closed.

        Raises:
            StoreError: the disk has lost some of it, or cannot be written.
        """
        if not self._local:
            return
        root = Path(self.address)
        full_paths = {root / path for path in paths}
        full_paths |= {child for path in full_paths for child in path.rglob("*")}
        parents = {path.parent for path in full_paths}
        parents |= {folder for path in parents for folder in path.parents}
        # Files before the folders that contain them.
        for path in sorted(full_paths | parents, reverse=True):
            _sync_path(path)

    def _get_location(self, path: str) -> Any:
        """Return a path below the root as a Java object; "" is the root itself."""
        return self._path(self._root, path) if path else self._root


def _sync_path(path: Path) -> None:
    """Flush a file or folder to the disk, against a power failure.

    A missing path was removed by another process and is ignored.
    """
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except FileNotFoundError:
        pass  # another process has removed it since it was listed
    except OSError as error:
        if error.errno not in _IGNORED_SYNC_ERRORS or not path.is_dir():
            msg = f"{path} could not be synced to disk: {error.strerror}; check the log of the disk"
            raise StoreError(msg) from error


@contextmanager
def undo_on_error(undo: Callable[[T], None], value: T) -> Iterator[None]:
    """Call `undo(value)` if the block fails, such as to remove files that no commit will name.

    An error of `undo` does not hide the error of the block.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):  # after an error of a full disk, free the space if possible
            undo(value)
        raise


def check_path(root: str) -> None:
    """Check the characters of a path.

    Raises:
        SetupError: Spark or deltalake would interpret a character of it.
    """
    if match := _UNSAFE_CHARACTERS.search(root):
        raise SetupError(
            f"the path {root} contains {match[0]!r}, which Spark or deltalake interprets: use a "
            "path without [ ] { } * ? # \\ and %XX"
        )


@convert_store_errors()
def read_json(spark: SparkSession, path: str) -> dict[str, Any] | None:
    """Read the JSON object in the file at `path`; None if there is no file.

    Raises:
        SetupError: the file holds something else, or cannot be read.
        NotSupportedError: Spark Connect, which gives no access to Java.
    """
    java, location, system = _open_path(spark, path)
    try:
        stream = system.open(location)
    except Py4JJavaError as error:
        if not _is_missing(error):
            raise
        # Java raises the same error for a file of another user and for a folder.
        if system.exists(location):
            msg = (
                f"{path} exists but cannot be read ({error.java_exception.getMessage()}): give the "
                "path of a file that this user may read and write"
            )
            raise SetupError(msg) from error
        return None
    try:
        text = str(getattr(java, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))
    finally:
        stream.close()
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise SetupError(
            f"{path} is not a JSON object: restore it from a copy, or give another path if it "
            "belongs to another program"
        )
    return content


@convert_store_errors()
def write_json(spark: SparkSession, path: str, content: dict[str, Any]) -> None:
    """Replace the file at `path` by `content` atomically, and create the folder.

    Readers find the old or the new content on local disks, on file systems of `RENAME_SCHEMES`, and
    in object stores that show a file when it is closed (s3a, gs). On others (ftp, dbfs) the
    guarantee is theirs: a crash in the middle may leave a file that cannot be read. Temporary files
    next to it that are older than an hour, left by writers that were killed, are deleted.

    Raises:
        NotSupportedError: Spark Connect, which gives no access to Java.
    """
    java, location, system = _open_path(spark, path)
    data = json.dumps(content, indent=2, sort_keys=True).encode()
    scheme = str(system.getUri().getScheme())
    if scheme != "file" and scheme not in RENAME_SCHEMES:
        _write_bytes(system, location, data)
        return
    system.mkdirs(location.getParent())
    temporary = getattr(java, "org.apache.hadoop.fs.Path")(
        location.getParent(), f".{location.getName()}.{uuid.uuid4().hex}.tmp"
    )
    try:
        _write_bytes(system, temporary, data)
        if scheme == "file":
            system.rename(temporary, location)  # POSIX: it replaces
        else:
            _rename_over(spark, java, temporary, location)
        with suppress(Py4JJavaError):  # the content is there; a later write tries again
            _delete_orphans(system, location)
    finally:
        system.delete(temporary, False)


def _delete_orphans(system: Any, location: Any) -> None:
    """Delete temporary files of killed writers, by the file system's own clock.

    A temporary file counts as abandoned when it is an hour older than the file just written.
    """
    written_at = system.getFileStatus(location).getModificationTime()
    for entry in system.listStatus(location.getParent()):
        name = str(entry.getPath().getName())
        is_temporary = name.startswith(f".{location.getName()}.") and name.endswith(".tmp")
        if is_temporary and entry.getModificationTime() < written_at - TEMPORARY_AGE_MS:
            system.delete(entry.getPath(), False)


def _write_bytes(system: Any, location: Any, data: bytes) -> None:
    """Write a complete file, flushed to the disk before a rename can publish the file."""
    stream = system.create(location, True)
    try:
        stream.write(bytearray(data))
        stream.hsync()
    finally:
        stream.close()


def _rename_over(spark: SparkSession, java: Any, temporary: Any, location: Any) -> None:
    """Replace a file by another atomically, through FileContext.

    FileSystem.rename refuses to replace an existing file. FileContext takes an array of options,
    which Python can only create by Java's reflection.
    """
    options = getattr(java, "java.lang.reflect.Array").newInstance(
        getattr(java, "java.lang.Class").forName("org.apache.hadoop.fs.Options$Rename"), 1
    )
    options[0] = getattr(java, "org.apache.hadoop.fs.Options$Rename").OVERWRITE
    configuration = spark._jsc.hadoopConfiguration()  # noqa: SLF001 - the only way
    getattr(java, "org.apache.hadoop.fs.FileContext").getFileContext(
        location.toUri(), configuration
    ).rename(temporary, location, options)


def _open_path(spark: SparkSession, path: str) -> tuple[Any, Any, Any]:
    """Return Java, the path as a Java object, and the file system.

    Java is py4j's view of the driver's JVM, which Spark Connect does not give.
    """
    java = get_java(spark)
    if java is None:
        raise NotSupportedError(
            "Spark Connect gives no access to Java, which lists and writes files here: run this "
            "in the driver's process (spark-submit, or build_session)"
        )
    location = getattr(java, "org.apache.hadoop.fs.Path")(path)
    system = location.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001 - the only way
    is_local = str(system.getUri().getScheme()) == "file"
    # No .crc files: a rename would leave them behind, and an edit would break them.
    return java, system.makeQualified(location), system.getRawFileSystem() if is_local else system


def _is_missing(error: Py4JJavaError) -> bool:
    """Return True if Java raised the error because a file does not exist."""
    return bool(error.java_exception.getClass().getName() == "java.io.FileNotFoundException")
