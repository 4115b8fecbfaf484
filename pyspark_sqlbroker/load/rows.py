"""Rows of a SELECT as Arrow record batches, limited in rows and bytes, while the database still
sends.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa

from faststream_sqlbroker.exceptions import MissingExtraError
from pyspark_sqlbroker.address import CONNECT_TIMEOUT, Address
from pyspark_sqlbroker.load.archive_pages import BATCH_BYTES
from pyspark_sqlbroker.load.body_texts import to_json_text
from pyspark_sqlbroker.load.columns import Field

BODY_COLUMN = "body"
"""The column that is computed from payload and headers."""

APPLICATION_NAME = "faststream_sqlbroker.spark"
WRITE_TIMEOUT = 3600
"""Seconds: MariaDB and MySQL close the connection when Spark takes no rows for so long; their
default is a minute.
"""

ARROW_TYPES = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def to_arrow_schema(fields: Sequence[Field], *, with_body: bool = False) -> pa.Schema:
    """Convert fields to an Arrow schema, optionally with the body's text; all are nullable."""
    columns = {field.name: ARROW_TYPES[field.type] for field in fields}
    return pa.schema(columns | ({BODY_COLUMN: pa.string()} if with_body else {}))


def read_batches(
    address: Address, statement: str, fields: Sequence[Field], fetch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Run `statement` and yield the rows; runs in a worker of Spark.

    Rows are yielded while the database still sends, so that no result needs to fit in memory.

    Args:
        address: Address of the database.
        statement: Selects exactly `fields`, in their order; where JDBC has no native timestamps,
            times as microseconds since 1970.
        fields: The columns.
        fetch_rows: Maximum number of rows of a batch.

    Returns:
        Batches of at most `fetch_rows` rows, and of few bytes more than `BATCH_BYTES` and one row.
    """
    schema = to_arrow_schema(fields)
    if address.kind == "postgresql":
        yield from _read_by_adbc(address, statement, schema, fetch_rows)
        return
    connect = _open_mysql_rows if address.kind == "mysql" else _open_sqlite_rows
    with connect(address, statement) as rows:
        yield from _split_batches(rows, schema, fetch_rows)


def _read_by_adbc(
    address: Address, statement: str, schema: pa.Schema, fetch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Run the statement by PostgreSQL's binary COPY, which ADBC decodes outside of Python.

    ADBC limits its batches by bytes only, so they are cut into slices of `fetch_rows` rows.
    """
    try:
        from adbc_driver_postgresql import StatementOptions, dbapi  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name!r} is not installed: pip install 'sqlbroker[spark]'"
        ) from error
    with (
        dbapi.connect(build_conninfo(address), autocommit=True) as connection,
        connection.cursor() as cursor,
    ):
        cursor.adbc_statement.set_options(
            **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}
        )
        cursor.execute(statement)
        for batch in cursor.fetch_record_batch():
            columns = [
                column.cast(type_)
                for column, type_ in zip(batch.columns, schema.types, strict=True)
            ]
            record_batch = pa.RecordBatch.from_arrays(columns, schema=schema)
            for first in range(0, record_batch.num_rows, fetch_rows):
                yield record_batch.slice(first, fetch_rows)


def build_conninfo(address: Address) -> str:
    """Build the parameters that libpq connects with, including the password.

    ADBC takes a connection string of libpq and no SQLAlchemy URL.
    """
    from psycopg.conninfo import make_conninfo  # noqa: PLC0415 - of PostgreSQL only

    url = address.python_url
    parameters: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "application_name": APPLICATION_NAME,
    }
    parameters |= dict(url.query) | {"user": url.username, "dbname": url.database}
    parameters |= {"host": url.host, "port": url.port}
    parameters["password"] = None if url.password is None else str(url.password)
    return make_conninfo("", **parameters)


@contextmanager
def _open_mysql_rows(address: Address, statement: str) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Run the statement with a cursor that holds a single row at a time.

    A plain cursor would fetch all rows first. The connection is dropped at the end, even with rows
    unread.
    """
    from pymysql.cursors import SSCursor  # noqa: PLC0415 - of MySQL only

    with address.create_engine().connect() as connection:
        raw: Any = connection.connection.dbapi_connection
        with raw.cursor() as cursor:
            cursor.execute(f"SET SESSION net_write_timeout = {WRITE_TIMEOUT}")
        try:
            cursor = raw.cursor(SSCursor)
            cursor.execute(statement)
            yield iter(cursor.fetchone, None)
        finally:
            # Closing the cursor would read the remaining rows, which Spark may not need (LIMIT).
            connection.invalidate()


@contextmanager
def _open_sqlite_rows(address: Address, statement: str) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Run the statement on a read-only connection.

    In WAL mode it takes no lock that blocks a writer.
    """
    import sqlite3  # noqa: PLC0415 - of SQLite only

    url = address.python_url
    timeout = float(str(url.query["timeout"]))
    with closing(
        sqlite3.connect(f"{url.database}?mode=ro", uri=True, timeout=timeout)
    ) as connection:
        connection.text_factory = _decode
        yield connection.execute(statement)


def _decode(value: bytes) -> str:
    """Replace bytes that are not UTF-8, as Java does: SQLite does not check texts."""
    return value.decode(errors="replace")


def _split_batches(
    rows: Iterator[tuple[Any, ...]], schema: pa.Schema, fetch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Collect rows into batches of at most `fetch_rows` rows and about `BATCH_BYTES`.

    Each value counts as 8 bytes, plus the length of texts and bytes.
    """
    sized_columns = [
        index
        for index, type_ in enumerate(schema.types)
        if pa.types.is_string(type_) or pa.types.is_binary(type_)
    ]
    pending: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        pending.append(row)
        size += 8 * len(row)
        for index in sized_columns:
            if row[index] is not None:
                size += len(row[index])
        if len(pending) >= fetch_rows or size >= BATCH_BYTES:
            yield to_batch(pending, schema)
            pending = []
            size = 0
    if pending:
        yield to_batch(pending, schema)


def to_batch(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to a batch, with their decoded bodies if the schema has `BODY_COLUMN`.

    Times are microseconds since 1970, and texts may be bytes of UTF-8.
    """
    columns = zip(*rows, strict=True)
    arrays = [_to_array(list(column), type_) for column, type_ in zip(columns, schema.types)]  # noqa: B905 - without the body
    if len(arrays) < len(schema):
        payloads, headers = (
            arrays[schema.get_field_index(name)] for name in ("payload", "headers")
        )
        bodies = map(to_json_text, payloads.to_pylist(), headers.to_pylist())
        arrays.append(pa.array(bodies, pa.string()))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _to_array(values: list[Any], type_: pa.DataType) -> pa.Array:
    """Convert the values of a column; texts may arrive as bytes, and bytes as text (SQLite).

    Times arrive as microseconds since 1970.
    """
    if pa.types.is_timestamp(type_):
        return pa.array(values, pa.int64()).cast(type_)
    if pa.types.is_binary(type_):
        # SQLite keeps each value's own type: other programs may have put text into the column.
        values = [value.encode() if isinstance(value, str) else value for value in values]
    elif pa.types.is_string(type_):
        values = [_decode(value) if isinstance(value, bytes) else value for value in values]
    return pa.array(values, type_)
