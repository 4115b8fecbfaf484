"""`spark.read.format("sqlbroker")`: a statement for each task, of the requested columns.

A stream reads its windows by the same statements.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.databases import ArchiveDatabase, get_database
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.load.frames import to_struct
from pyspark_sqlbroker.load.rows import read_batches
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.source.options import SourceOptions

MIN_PARTITIONS = 2
"""Minimum number of partitions of a table that is not small. As with JDBC each task opens a
connection, and a Python worker too: more tasks than cores are slower.
"""


class StatementPartition(InputPartition):
    """The rows of a task; `value` is the statement to read."""

    value: str


class BatchReader(DataSourceReader):
    """Reads the rows that exist at planning time, by the database's clock."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._fields = select_fields(schema, options.selection)

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each task; only statistics are queried."""
        try:
            return self._plan()
        except NotImplementedError as error:
            # On NotImplementedError Spark would read everything as a single partition.
            raise SetupError(str(error)) from error

    def _plan(self) -> list[InputPartition]:
        """Cut the selected rows, up to the database's current time, into partitions.

        Without that end, tasks that start later would read newer rows than the others.
        """
        database = get_database(self._options.address)
        with database.connect() as connection:
            selection = self._options.selection.end_now(database, connection)
            return plan_partitions(database, connection, self._options, selection, self._fields)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read the rows of a partition as Arrow record batches."""
        return read_partition(self._options, self._fields, partition)


def select_fields(schema: StructType, selection: Selection) -> list[Field]:
    """Return the fields of a user's schema, in order.

    Spark passes the schema that the source has returned, or the one given to `schema(…)`, which may
    name fewer columns.

    Raises:
        SetupError: a name or a type that is not in the table; the message lists the allowed
            columns.
    """
    fields = {field.name: field for field in selection.fields}
    types = {field.name: field.dataType for field in to_struct(selection.fields)}
    for column in schema:
        if column.name not in fields or column.dataType != types[column.name]:
            allowed = ", ".join(f"{field.name} {field.type}" for field in selection.fields)
            raise SetupError(
                f"the schema's column {column.name!r} of type {column.dataType.simpleString()} is "
                f"not in the table; allowed are {allowed}"
            )
    return [fields[column.name] for column in schema]


def read_partition(
    options: SourceOptions, fields: Sequence[Field], partition: InputPartition | None
) -> Iterator[Any]:
    """Read the rows of a task as record batches; runs in a worker of Spark.

    The partition is one that `build_partitions` made in the driver, with the task's statement.

    Raises:
        SetupError: Spark passed a partition that was not planned.
    """
    if not isinstance(partition, StatementPartition):
        raise SetupError(
            f"Spark requested the rows of {partition!r}, which was not planned: please report this"
        )
    return read_batches(options.address, partition.value, fields, options.fetch_rows)


def plan_partitions(
    database: ArchiveDatabase,
    connection: Connection,
    options: SourceOptions,
    selection: Selection,
    fields: list[Field],
) -> list[InputPartition]:
    """Cut the selected rows into partitions, a statement for each task.

    The number is that of the option numPartitions, else chosen by the size of the table.

    Raises:
        SetupError: the database has no such table.
    """
    database.require_table(connection, selection.table, selection.schema)
    number = options.num_partitions or database.estimate_size(
        connection, selection.table, selection.schema
    ).choose_partitions(MIN_PARTITIONS)
    column = selection.choose_range_column()
    conditions = database.build_predicates(
        connection, selection.build_table_range(database, column), number
    )
    return build_partitions(database, selection, fields, column, conditions)


def build_partitions(
    database: ArchiveDatabase,
    selection: Selection,
    fields: Sequence[Field],
    column: str,
    conditions: Sequence[str],
) -> list[InputPartition]:
    """Build a partition for each condition on `column`, from `build_predicates`.

    A partition is the statement that one task runs. `column` is selected inside even if `fields`
    lacks it, as the conditions need it.
    """
    names = {field.name for field in fields} | {column}
    inner = selection.build_subquery(database, names, column)
    outer = ", ".join(database.build_source_column(field) for field in fields)
    return [
        StatementPartition(f"SELECT {outer} FROM {inner} WHERE {condition}")
        for condition in conditions
    ]
