"""`spark.read.format("sqlbroker")`."""

from collections.abc import Iterable, Iterator
from typing import Any

import pyspark
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from faststream_sqlbroker.core.times import TICK
from faststream_sqlbroker.exceptions import NotSupportedError, SetupError
from faststream_sqlbroker.spark.databases import database_of
from faststream_sqlbroker.spark.source.filters import to_sql
from faststream_sqlbroker.spark.source.options import Options
from faststream_sqlbroker.spark.source.scan import (
    check_partitioner,
    read_cut,
    wanted_fields,
    whole_table,
)


class BatchReader(DataSourceReader):
    """Reads the rows that exist when the query is planned; the database's clock ends the window."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._fields = wanted_fields(schema, options.selection)
        self._pushed: list[str] = []

    def partitions(self) -> list[InputPartition]:
        """One cut of the table for each task; asks for statistics only."""
        try:
            return self._cuts()
        except NotImplementedError as error:
            # On NotImplementedError Spark would read everything as a single partition.
            raise SetupError(str(error)) from error

    def _cuts(self) -> list[InputPartition]:
        database = database_of(self._options.address)
        selection = self._options.selection
        with database.connect() as connection:
            end = database.now(connection) + TICK
            until = end if selection.until is None else min(end, selection.until)
            selection = selection.between(selection.since, until)
            return whole_table(
                database, connection, self._options, selection, self._fields, self._pushed
            )

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one cut as Arrow's record batches."""
        return read_cut(self._options, self._fields, partition)


class FilteringReader(BatchReader):
    """Lets the database look for rows too; Spark refuses it unless its setting allows that."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 - Spark's name
        """Keep those that the database understands, and let Spark check all of them again.

        What is pushed never takes rows away that Spark would keep; it may leave some that Spark
        drops (MariaDB and MySQL do not tell "a" from "a ").
        """
        database = database_of(self._options.address)
        known = {field.name: field for field in self._options.selection.fields}
        for given in filters:
            condition = to_sql(given, database, known)
            if condition is not None:
                self._pushed.append(condition)
        return filters


def make_reader(options: Options, schema: StructType) -> DataSourceReader:
    """A reader that pushes filters only if asked to: Spark refuses every read of one while its
    setting is off.

    Raises:
        SetupError: a column or type that the table has not.
        NotSupportedError: a partitioner that the database or the table cannot have, or filters are
            to be pushed and this Spark mixes them up.
    """
    check_partitioner(options)
    if not options.push_filters:
        return BatchReader(options, schema)
    if not keeps_filters_apart():
        raise NotSupportedError(
            f"pushFilters: Spark {pyspark.__version__} gives the filters of one query to the next "
            "ones of the same DataFrame, which then lack rows. Leave it out and give queues, "
            "states, since and until, or take read_archive, which pushes filters by JDBC"
        )
    return FilteringReader(options, schema)


def keeps_filters_apart() -> bool:
    """Whether this Spark keeps what was pushed with the scan, not with the source that all scans
    share.

    Seen on 4.1.4: df.filter("id = 3").count() and then df.count() counts 1. The change that ended
    it (SPARK-58551) also brought `pushLimit`.
    """
    return hasattr(DataSourceReader, "pushLimit")
