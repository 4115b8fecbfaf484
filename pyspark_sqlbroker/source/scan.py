"""`spark.read.format("sqlbroker")`: a statement for each task, of the columns that are wanted.

A stream reads its windows by the same statements.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.load.frames import to_struct
from pyspark_sqlbroker.load.rows import read_batches
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.source.options import Options

MIN_PARTITIONS = 2
"""Of a table that is not small. As by JDBC each task starts a connection, and a Python worker too:
more tasks than cores are slower."""


class Cut(InputPartition):
    """The rows of one task: `value` is the statement that reads them."""

    value: str


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
        with database.connect() as connection:
            selection = self._options.selection.closed(database, connection)
            return whole_table(database, connection, self._options, selection, self._fields)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one cut as Arrow's record batches."""
        return read_cut(self._options, self._fields, partition)


def wanted_fields(schema: StructType, selection: Selection) -> list[Field]:
    """The fields that a user's schema names, in its order.

    Raises:
        SetupError: a name that the table has not, or another type; it lists what is allowed.
    """
    known = {field.name: field for field in selection.fields}
    types = {field.name: field.dataType for field in to_struct(selection.fields)}
    for column in schema:
        if column.name not in known or column.dataType != types[column.name]:
            allowed = ", ".join(f"{field.name} {field.type}" for field in selection.fields)
            raise SetupError(
                f"the schema's column {column.name!r} of type {column.dataType.simpleString()} is "
                f"not in the table; allowed are {allowed}"
            )
    return [known[column.name] for column in schema]


def read_cut(
    options: Options, fields: Sequence[Field], cut: InputPartition | None
) -> Iterator[Any]:
    """The rows of one task, as record batches.

    Raises:
        SetupError: Spark gave none of the cuts that were planned.
    """
    if not isinstance(cut, Cut):
        raise SetupError(
            f"Spark asks for the rows of {cut!r}, which was not planned: please report this"
        )
    return read_batches(options.address, cut.value, fields, options.fetch_rows)


def whole_table(
    database: ArchiveDatabase,
    connection: Connection,
    options: Options,
    selection: Selection,
    fields: list[Field],
) -> list[InputPartition]:
    """Cuts of the selected rows.

    Raises:
        SetupError: the database has no such table.
    """
    database.need_table(connection, selection.table, selection.schema)
    number = options.num_partitions or database.size(
        connection, selection.table, selection.schema
    ).partitions(MIN_PARTITIONS)
    column = selection.range_column()
    cuts = database.predicates(connection, selection.cut_by(database, column), number)
    return make_cuts(database, selection, fields, column, cuts)


def make_cuts(
    database: ArchiveDatabase,
    selection: Selection,
    fields: Sequence[Field],
    column: str,
    cuts: Sequence[str],
) -> list[InputPartition]:
    """A statement for each of `cuts`, which are conditions on `column` (as `Database.predicates`
    makes them).
    """
    names = {field.name for field in fields} | {column}
    inner = selection.subquery(database, names, column)
    outer = ", ".join(database.quote(field.name) for field in fields)
    return [Cut(f"SELECT {outer} FROM {inner} WHERE {cut}") for cut in cuts]
