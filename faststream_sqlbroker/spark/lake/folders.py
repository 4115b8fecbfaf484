"""Folders of a lake, through Hadoop's FileSystem: local disks, HDFS and object stores alike."""

from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import NotSupportedError
from faststream_sqlbroker.spark.drivers import java_of


class Folders:
    """Files and folders below one path."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._java = java_of(spark)
        if self._java is None:
            raise NotSupportedError(
                "Spark Connect cannot move files, a classic session can: run exports where Spark's "
                "driver runs"
            )
        self._configuration: Any = spark._jsc.hadoopConfiguration()  # noqa: SLF001 - the only way to it
        self._path: Any = getattr(self._java, "org.apache.hadoop.fs.Path")
        given = self._path(root)
        self._system: Any = given.getFileSystem(self._configuration)
        self._root: Any = self._system.makeQualified(given)
        self.root = str(self._root.toString())

    def path(self, place: str) -> str:
        """The full path of `place`."""
        return f"{self.root}/{place}"

    def exists(self, place: str) -> bool:
        """Whether `place` is a file or a folder."""
        return bool(self._system.exists(self._at(place)))

    def move(self, source: str, target: str) -> None:
        """Rename a folder; `target` must not exist, its parents are made.

        Raises:
            OSError: the file system refused.
        """
        self._system.mkdirs(self._at(target).getParent())
        if self.exists(target) or not self._system.rename(self._at(source), self._at(target)):
            raise OSError(f"{self.path(source)} cannot be renamed to {self.path(target)}")

    def delete(self, place: str) -> None:
        """Remove a folder with everything in it, if it is there."""
        self._system.delete(self._at(place), True)

    def delete_empty(self, place: str) -> None:
        """Remove a folder if it is empty."""
        if self.exists(place) and not self.names(place):
            with suppress(Py4JJavaError):  # something has come into it since
                self._system.delete(self._at(place), False)

    def names(self, place: str = "") -> list[str]:
        """Names of what is in a folder, in order; none if there is no such folder."""
        at = self._at(place)
        if not self._system.exists(at):
            return []
        return sorted(str(one.getPath().getName()) for one in self._system.listStatus(at))

    def sizes(self, place: str) -> list[int]:
        """The size in bytes of each Parquet file in a folder."""
        at = self._at(place)
        if not self._system.exists(at):
            return []
        found = self._system.listStatus(at)
        return [
            int(one.getLen()) for one in found if str(one.getPath().getName()).endswith(".parquet")
        ]

    def _at(self, place: str) -> Any:
        return self._path(self._root, place) if place else self._root
