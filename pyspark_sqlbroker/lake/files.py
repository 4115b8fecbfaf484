"""Small JSON files next to the data, on any file system that Spark writes to.

`write_json` says how safe a write is on each.
"""

import json
import uuid
from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import NotSupportedError, SetupError
from pyspark_sqlbroker.drivers import java_of

RENAMING = ("hdfs", "webhdfs", "swebhdfs", "viewfs", "abfs", "abfss", "adl", "ofs", "o3fs")
"""Where a file replaces another by one rename; an object store shows what was written when it is
closed."""

LEFT_AFTER = 3_600_000
"""Milliseconds after which the writer of a temporary file counts as dead."""


def read_json(spark: SparkSession, path: str) -> dict[str, Any] | None:
    """The object in the file at `path`; None if there is no file.

    Raises:
        SetupError: it holds something else, or is there and cannot be read.
        NotSupportedError: Spark Connect, whose Java cannot be asked.
    """
    text = read_text(spark, path)
    if text is None:
        return None
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


def read_text(spark: SparkSession, path: str) -> str | None:
    """The text of the file at `path`; None if there is no file.

    Raises:
        SetupError: it is there and cannot be read.
        NotSupportedError: Spark Connect, whose Java cannot be asked.
    """
    java, place, system = _open(spark, path)
    try:
        stream = system.open(place)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() != "java.io.FileNotFoundException":
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
        return str(getattr(java, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))
    finally:
        stream.close()


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
            "files of state are written by Spark's own Java, which Spark Connect does not show: "
            "run this in the driver's process (spark-submit, or build_session)"
        )
    place = getattr(java, "org.apache.hadoop.fs.Path")(path)
    configuration = spark._jsc.hadoopConfiguration()  # noqa: SLF001 - the only way
    system = place.getFileSystem(configuration)
    place = system.makeQualified(place)
    # No .crc files: a rename would leave them behind, and an edit would break them.
    return (
        java,
        place,
        system.getRawFileSystem() if str(system.getUri().getScheme()) == "file" else system,
    )
