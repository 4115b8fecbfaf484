"""SQL functions for programs without Python: publish, cancel, and the load of a queue.

They are optional and apart from the tables' migrations. Their version rises when one of them
changes; arguments are only ever added, with a default where the database has such a thing, so a
caller of an older version goes on.
"""

from sqlalchemy import Connection, inspect, text

from faststream_sqlbroker.exceptions import NotSupportedError, SchemaError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.functions import mysql, postgresql
from faststream_sqlbroker.schema.functions.names import NAMES, VERSION, FunctionNames
from faststream_sqlbroker.schema.tables import Tables, build_tables
from faststream_sqlbroker.schema.types import MYSQL

__all__ = (
    "NAMES",
    "VERSION",
    "FunctionNames",
    "functions",
    "install_functions",
    "render_functions",
)

_PUBLIC = "public"
"""PostgreSQL's schema in rendered SQL, where no other is named."""
_STRICT = (
    "STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,"
    "NO_ENGINE_SUBSTITUTION"
)
"""MySQL's and MariaDB's routines run under the `sql_mode` of their creation."""
_MODE = "SET @sqlbroker_sql_mode = @@SESSION.sql_mode, SESSION sql_mode = '{mode}'"
_MODE_AGAIN = "SET SESSION sql_mode = @sqlbroker_sql_mode"


def functions(dialect_name: str, tables: Tables, schema: str | None = None) -> list[str]:
    """The statements that create the functions, or replace them.

    Args:
        dialect_name: The database.
        tables: Their tables.
        schema: PostgreSQL's schema of the tables, as the functions name it.

    Raises:
        NotSupportedError: SQLite, which has no stored functions.
    """
    if dialect_name == "postgresql":
        return postgresql.statements(tables, schema or tables.config.schema or _PUBLIC)
    if dialect_name in MYSQL:
        strict = _MODE.format(mode=_STRICT)
        return [strict, *mysql.statements(tables), _MODE_AGAIN]
    raise NotSupportedError(
        "SQLite has no stored functions: insert rows into the message table instead, as "
        "docs/howto/plain_sql.md says"
    )


def install_functions(connection: Connection, config: SqlBrokerSchemaConfig | None = None) -> None:
    """Create the functions, or replace those of another version, in the schema of the tables.

    On PostgreSQL it is part of the transaction of `connection`; MySQL and MariaDB commit each
    statement. The functions do what their owner may: the connection's user, who needs the rights of
    a producer and of an operator. On MySQL and MariaDB users must be granted them anew.

    Raises:
        NotSupportedError: the database is SQLite.
        SchemaError: the tables are not there.
    """
    tables = build_tables(config or SqlBrokerSchemaConfig())
    schema = _schema_of(connection, tables)
    for statement in functions(connection.dialect.name, tables, schema):
        connection.execute(text(statement.replace(":", "\\:")))


def render_functions(dialect_name: str, config: SqlBrokerSchemaConfig | None = None) -> str:
    """The functions as readable SQL for postgresql or mysql, for psql or mysql's client.

    Raises:
        NotSupportedError: SQLite, which has no stored functions.
    """
    found = functions(dialect_name, build_tables(config or SqlBrokerSchemaConfig()))
    if dialect_name in MYSQL:
        return "DELIMITER $$\n\n" + "".join(f"{each}$$\n\n" for each in found) + "DELIMITER ;\n"
    return "BEGIN;\n\n" + "".join(f"{each};\n\n" for each in found) + "COMMIT;\n"


def _schema_of(connection: Connection, tables: Tables) -> str | None:
    """PostgreSQL's schema in which the message table is."""
    message = tables.message
    if connection.dialect.name != "postgresql":
        there = inspect(connection).has_table(message.name, schema=message.schema)
        if not there and connection.dialect.name in MYSQL:
            raise SchemaError(_missing(message.fullname))
        return None
    name = connection.dialect.identifier_preparer.format_table(message)
    find = text(
        "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.oid = to_regclass(:name)"
    )
    found = connection.execute(find, {"name": name}).scalar()
    if found is None:
        raise SchemaError(_missing(message.fullname))
    return str(found)


def _missing(table: str) -> str:
    return f"the table {table!r} is missing: create the tables first, then their functions"
