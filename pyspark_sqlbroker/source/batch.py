"""`spark.read.format("sqlbroker")`."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from faststream_sqlbroker.core.times import TICK
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.source.options import Options
from pyspark_sqlbroker.source.scan import read_cut, wanted_fields, whole_table


class BatchReader(DataSourceReader):
    """Reads the rows that exist when the query is planned; the database's clock ends the window."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._fields = wanted_fields(schema, options.selection)

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
            return whole_table(database, connection, self._options, selection, self._fields)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one cut as Arrow's record batches."""
        return read_cut(self._options, self._fields, partition)
