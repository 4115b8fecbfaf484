"""Files through Hadoop's FileSystem, on local disks, HDFS and object stores alike.

`Folders` are those of a lake. Small JSON files stand next to the data; `write_json` says how safe a
write is on each file system.
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
from pyspark_sqlbroker.drivers import java_of
from pyspark_sqlbroker.store_errors import store_errors

T = TypeVar("T")

RENAMING = ("hdfs", "webhdfs", "swebhdfs", "viewfs", "abfs", "abfss", "adl", "ofs", "o3fs")
"""Where a file replaces another by one rename; an object store shows what was written when it is
closed."""

LEFT_AFTER = 3_600_000
"""Milliseconds after which the writer of a temporary file counts as dead."""

_REFUSED = re.compile(r"[][{}*?#\\]|%[0-9A-Fa-f]{2}")
"""Spark takes brackets, * and ? for patterns; deltalake reads # and ? as parts of a URL, a
backslash as a slash, and %20 as a space."""

_UNSYNCED = {errno.EACCES, errno.EBADF, errno.EINVAL}
"""Errors of folders that this user may not read, or whose file system syncs no folders."""

_SCHEMES = {"s3a": "s3", "s3n": "s3"}
"""What deltalake calls the schemes that Hadoop has names of its own for."""


@dataclass(frozen=True)
class Found:
    """A file on disk.

    Attributes:
        size: In bytes.
        modified: Milliseconds since 1970, by the clock of the file system.
    """

    size: int
    modified: int


class Folders:
    """Files and folders below one path."""

    _local = False

    def __init__(self, spark: SparkSession, root: str) -> None:
        # Hadoop's .crc files would turn an altered file into an error of Java.
        self._java, self._root, self._system = _open(spark, root)
        self._path: Any = getattr(self._java, "org.apache.hadoop.fs.Path")
        scheme = str(self._system.getUri().getScheme())
        self._local = scheme == "file"
        self._flat = not self._local and scheme not in RENAMING
        self.root = str(self._root.toString())
        refuse_path(self.root)

    @property
    def address(self) -> str:
        """The root as deltalake takes it: a local path, or a URL of its own scheme."""
        uri = self._root.toUri()
        scheme = str(uri.getScheme())
        if self._local:
            return str(uri.getPath())
        return self.root.replace(scheme, _SCHEMES.get(scheme, scheme), 1)

    def path(self, place: str) -> str:
        """The full path of `place`."""
        return f"{self.root}/{place}"

    def names(self, place: str = "") -> list[str]:
        """Names of what is in a folder, in order; none if there is no such folder."""
        at = self._at(place)
        if not self._system.exists(at):
            return []
        return sorted(str(one.getPath().getName()) for one in self._system.listStatus(at))

    def files(self, place: str) -> dict[str, Found]:
        """All files below a folder, by their place; none if there is no such folder."""
        found = dict[str, Found]()
        start = len(str(self._root.toUri().getPath()).rstrip("/")) + 1
        waiting = [self._at(place)]
        while waiting:
            for one in self._listed(waiting.pop()):
                if one.isDirectory():
                    waiting.append(one.getPath())
                    continue
                name = str(one.getPath().toUri().getPath())[start:]
                found[name] = Found(int(one.getLen()), int(one.getModificationTime()))
        return found

    def newest(self, place: str) -> int:
        """When the last of a folder, its folders and files was written; 0 if it is gone.

        A folder in which nothing was written yet has a time, too, except in an object store.
        """
        at = self._at(place)
        if not self._system.exists(at):
            return 0
        moments = [int(self._system.getFileStatus(at).getModificationTime())]
        waiting = [at]
        while waiting:
            for one in self._listed(waiting.pop()):
                moments.append(int(one.getModificationTime()))
                if one.isDirectory():
                    waiting.append(one.getPath())
        return max(moments)

    def _listed(self, folder: Any) -> Iterator[Any]:
        """What is in a folder; of an object store all files below it, which is one request."""
        try:
            if self._flat:
                listed = self._system.listFiles(folder, True)
                while listed.hasNext():
                    yield listed.next()
            else:
                # listFiles fails if files go while it runs; other attempts remove theirs.
                yield from self._system.listStatus(folder)
        except Py4JJavaError as error:
            if not _is_missing(error):
                raise

    def delete(self, place: str) -> None:
        """Remove a file, or a folder with everything in it, if it is there."""
        self._system.delete(self._at(place), True)

    def sha256(self, place: str) -> str:
        """The SHA-256 of a file's bytes, as hexadecimal digits; it is read as a stream."""
        stream = self._system.open(self._at(place))
        try:
            digest = getattr(self._java, "org.apache.commons.codec.digest.DigestUtils")
            return str(digest.sha256Hex(stream))
        finally:
            stream.close()

    def now(self) -> int:
        """Milliseconds since 1970 by the clock of the file system, read from a file made for it."""
        probe = self._at(f"data/.{uuid.uuid4().hex}.tmp")
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
        """Write rows as Parquet to a folder; returns the places of the files."""
        frame.write.option("compression", "zstd").parquet(self.path(folder))
        return {one for one in self.files(folder) if one.endswith(".parquet")}

    def read(
        self, session: SparkSession, schema: StructType, places: Sequence[str], name: str = ""
    ) -> DataFrame:
        """The rows of files; with `name` a column of it has the name of the file."""
        frame = session.read.schema(schema).parquet(*(self.path(one) for one in places))
        return frame.select("*", F.col("_metadata.file_name").alias(name)) if name else frame

    def sync(self, places: Iterable[str]) -> None:
        """Have files, those in folders, and all folders above them written to the local disk.

        What executors have written is in the cache of this host, too, if the path is a disk of it.
        Elsewhere nothing is done: object stores keep a file once it is closed.

        Raises:
            StoreError: the disk has lost some of it, or cannot be written.
        """
        if not self._local:
            return
        root = Path(self.address)
        paths = {root / place for place in places}
        paths |= {one for path in paths for one in path.rglob("*")}
        above = {path.parent for path in paths}
        above |= {folder for path in above for folder in path.parents}
        # A file before the folders that name it.
        for path in sorted(paths | above, reverse=True):
            _sync(path)

    def _at(self, place: str) -> Any:
        return self._path(self._root, place) if place else self._root


def _sync(path: Path) -> None:
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except FileNotFoundError:
        pass  # another process has removed it since it was listed
    except OSError as error:
        if error.errno not in _UNSYNCED or not path.is_dir():
            msg = f"{path} could not be written to its disk: {error.strerror}; see the disk's log"
            raise StoreError(msg) from error


@contextmanager
def undo_on_error(undo: Callable[[T], None], value: T) -> Iterator[None]:
    """Call `undo(value)` if the block fails; an error of it does not hide that of the block."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # a full disk is not to stay full
            undo(value)
        raise


def refuse_path(root: str) -> None:
    """Raises SetupError if Spark or deltalake would take the path for another."""
    if found := _REFUSED.search(root):
        raise SetupError(
            f"the path {root} has {found[0]!r}, which Spark or deltalake takes for something else: "
            "give a path without [ ] { } * ? # \\ and %XX"
        )


@store_errors()
def read_json(spark: SparkSession, path: str) -> dict[str, Any] | None:
    """The object in the file at `path`; None if there is no file.

    Raises:
        SetupError: it holds something else, or is there and cannot be read.
        NotSupportedError: Spark Connect, whose Java cannot be asked.
    """
    java, place, system = _open(spark, path)
    try:
        stream = system.open(place)
    except Py4JJavaError as error:
        if not _is_missing(error):
            raise
        # Java raises the same error for a file of another user and for a folder.
        if system.exists(place):
            msg = (
                f"{path} is there and cannot be read ({error.java_exception.getMessage()}): give "
                "the path of a file that this user may read and write"
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
            f"{path} holds no JSON object: restore it from a copy, or give another path if it is "
            "none of ours"
        )
    return content


@store_errors()
def write_json(spark: SparkSession, path: str, content: dict[str, Any]) -> None:
    """Put `content` in place of the file at `path`, whose folder is made: a reader finds the old or
    the new.

    So it is on local disks, on those of `RENAMING` and in object stores that show a file when it is
    closed (s3a, gs). On others (ftp, dbfs) it is as they do it: a crash in the middle may leave a
    file that cannot be read. Temporary files next to it that are older than an hour, left by
    writers that were killed, are deleted.

    Raises:
        NotSupportedError: Spark Connect, whose Java cannot be asked.
    """
    java, place, system = _open(spark, path)
    data = json.dumps(content, indent=2, sort_keys=True).encode()
    scheme = str(system.getUri().getScheme())
    if scheme != "file" and scheme not in RENAMING:
        _put(system, place, data)
        return
    system.mkdirs(place.getParent())
    temporary = getattr(java, "org.apache.hadoop.fs.Path")(
        place.getParent(), f".{place.getName()}.{uuid.uuid4().hex}.tmp"
    )
    try:
        _put(system, temporary, data)
        if scheme == "file":
            system.rename(temporary, place)  # POSIX: it replaces
        else:
            _replace(spark, java, temporary, place)
        with suppress(Py4JJavaError):  # the content is there; a later write tries again
            _delete_left(system, place)
    finally:
        system.delete(temporary, False)


def _delete_left(system: Any, place: Any) -> None:
    """Delete temporary files of writers that were killed; times are compared by the file system's
    own clock.
    """
    written = system.getFileStatus(place).getModificationTime()
    for one in system.listStatus(place.getParent()):
        name = str(one.getPath().getName())
        ours = name.startswith(f".{place.getName()}.") and name.endswith(".tmp")
        if ours and one.getModificationTime() < written - LEFT_AFTER:
            system.delete(one.getPath(), False)


def _put(system: Any, place: Any, data: bytes) -> None:
    stream = system.create(place, True)
    try:
        stream.write(bytearray(data))
        stream.hsync()
    finally:
        stream.close()


def _replace(spark: SparkSession, java: Any, temporary: Any, place: Any) -> None:
    """Rename by FileContext, as FileSystem.rename refuses to replace a file."""
    options = getattr(java, "java.lang.reflect.Array").newInstance(
        getattr(java, "java.lang.Class").forName("org.apache.hadoop.fs.Options$Rename"), 1
    )
    options[0] = getattr(java, "org.apache.hadoop.fs.Options$Rename").OVERWRITE
    configuration = spark._jsc.hadoopConfiguration()  # noqa: SLF001 - the only way
    getattr(java, "org.apache.hadoop.fs.FileContext").getFileContext(
        place.toUri(), configuration
    ).rename(temporary, place, options)


def _open(spark: SparkSession, path: str) -> tuple[Any, Any, Any]:
    """Java, the path in it, and its file system."""
    java = java_of(spark)
    if java is None:
        raise NotSupportedError(
            "files are listed and written by Spark's own Java, which Spark Connect does not show: "
            "run this in the driver's process (spark-submit, or build_session)"
        )
    place = getattr(java, "org.apache.hadoop.fs.Path")(path)
    system = place.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001 - the only way
    local = str(system.getUri().getScheme()) == "file"
    # No .crc files: a rename would leave them behind, and an edit would break them.
    return java, system.makeQualified(place), system.getRawFileSystem() if local else system


def _is_missing(error: Py4JJavaError) -> bool:
    return bool(error.java_exception.getClass().getName() == "java.io.FileNotFoundException")
