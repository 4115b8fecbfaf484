"""SQL functions for programs without Python: publish, cancel, and the load of a queue.

They are optional and independent of the tables' migrations. Their version increases with each
change of a function. Arguments are only ever added, with a default where the database supports
defaults, so callers of older versions keep working.
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
    "build_functions",
    "install_functions",
    "render_functions",
)

_PUBLIC = "public"
"""PostgreSQL's schema in rendered SQL, if no other is named."""
_STRICT = (
    "STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,"
    "NO_ENGINE_SUBSTITUTION"
)
"""Routines of MySQL and MariaDB run under the `sql_mode` of their creation."""
_SET_MODE = "SET @sqlbroker_sql_mode = @@SESSION.sql_mode, SESSION sql_mode = '{mode}'"
_RESTORE_MODE = "SET SESSION sql_mode = @sqlbroker_sql_mode"


def build_functions(dialect_name: str, tables: Tables, schema: str | None = None) -> list[str]:
    """Return the statements that create or replace the functions.

    Args:
        dialect_name: The database.
        tables: The tables of the functions.
        schema: PostgreSQL's schema of the tables, as the functions name it.

    Raises:
        NotSupportedError: SQLite, which has no stored functions.
    """
    if dialect_name == "postgresql":
        return postgresql.build_statements(tables, schema or tables.config.schema or _PUBLIC)
    if dialect_name in MYSQL:
        strict = _SET_MODE.format(mode=_STRICT)
        return [strict, *mysql.build_statements(tables), _RESTORE_MODE]
    raise NotSupportedError(
        "SQLite has no stored functions: insert rows into the message table instead, as "
        "docs/howto/plain_sql.md says"
    )


def install_functions(connection: Connection, config: SqlBrokerSchemaConfig | None = None) -> None:
    """Create the functions, or replace functions of another version, in the tables' schema.

    On PostgreSQL this is part of the transaction of `connection`; MySQL and MariaDB commit each
    statement. The functions run with the rights of their owner: the connection's user, who needs
    the rights of a producer and of an operator. On MySQL and MariaDB the rights on the functions
    must be granted to their users again.

    Raises:
        NotSupportedError: the database is SQLite.
        SchemaError: the tables are missing.
    """
    tables = build_tables(config or SqlBrokerSchemaConfig())
    schema = _get_schema(connection, tables)
    for statement in build_functions(connection.dialect.name, tables, schema):
        # SQLAlchemy's text() would take a colon for the beginning of a parameter.
        connection.execute(text(statement.replace(":", "\\:")))


def render_functions(dialect_name: str, config: SqlBrokerSchemaConfig | None = None) -> str:
    """Return the functions as readable SQL for postgresql or mysql, for psql or mysql's client.

    Raises:
        NotSupportedError: SQLite, which has no stored functions.
    """
    statements = build_functions(dialect_name, build_tables(config or SqlBrokerSchemaConfig()))
    if dialect_name in MYSQL:
        return (
            "DELIMITER $$\n\n"
            + "".join(f"{statement}$$\n\n" for statement in statements)
            + "DELIMITER ;\n"
        )
    return "BEGIN;\n\n" + "".join(f"{statement};\n\n" for statement in statements) + "COMMIT;\n"


def _get_schema(connection: Connection, tables: Tables) -> str | None:
    """Return PostgreSQL's schema of the message table, None on other databases.

    The functions name it, because the search_path of their callers may differ.

    Raises:
        SchemaError: the message table does not exist.
    """
    message = tables.message
    if connection.dialect.name != "postgresql":
        exists = inspect(connection).has_table(message.name, schema=message.schema)
        if not exists and connection.dialect.name in MYSQL:
            raise SchemaError(_format_missing(message.fullname))
        return None
    name = connection.dialect.identifier_preparer.format_table(message)
    query = text(
        "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.oid = to_regclass(:name)"
    )
    schema = connection.execute(query, {"name": name}).scalar()
    if schema is None:
        raise SchemaError(_format_missing(message.fullname))
    return str(schema)


def _format_missing(table: str) -> str:
    return f"the table {table!r} is missing: create the tables first, then their functions"
