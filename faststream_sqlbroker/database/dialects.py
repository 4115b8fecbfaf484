"""All SQL, one module for each database."""

from typing import Any

from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.mysql.dialect import MariadbDialect, MysqlDialect
from faststream_sqlbroker.database.postgresql.dialect import PostgresqlDialect
from faststream_sqlbroker.database.sqlite.dialect import SqliteDialect
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.tables import Tables

DIALECTS: dict[str, type[Dialect]] = {
    d.name: d for d in (PostgresqlDialect, MysqlDialect, MariadbDialect, SqliteDialect)
}

__all__ = ("DIALECTS", "Dialect", "dialect_for")


def dialect_for(sqlalchemy_dialect: Any, tables: Tables) -> Dialect:
    """The dialect of an engine over `tables`.

    Raises:
        SetupError: the database is none of those supported.
    """
    found = DIALECTS.get(sqlalchemy_dialect.name)
    if found is None:
        known = ", ".join(DIALECTS)
        msg = f"the broker does not support {sqlalchemy_dialect.name!r}; use one of {known}"
        raise SetupError(msg)
    return found(tables, sqlalchemy_dialect)
