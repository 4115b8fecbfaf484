"""All SQL, one module for each database."""

from importlib import import_module
from typing import Any

from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.tables import Tables

DIALECTS = {
    "postgresql": "faststream_sqlbroker.database.postgresql.dialect.PostgresqlDialect",
    "mysql": "faststream_sqlbroker.database.mysql.dialect.MysqlDialect",
    "mariadb": "faststream_sqlbroker.database.mysql.dialect.MariadbDialect",
    "sqlite": "faststream_sqlbroker.database.sqlite.dialect.SqliteDialect",
}
"""The class of each database; a process imports that of its own."""

__all__ = ("DIALECTS", "Dialect", "dialect_for")


def dialect_for(sqlalchemy_dialect: Any, tables: Tables) -> Dialect:
    """The dialect of an engine over `tables`.

    Raises:
        SetupError: the database is none of those supported.
    """
    home = DIALECTS.get(sqlalchemy_dialect.name)
    if home is None:
        known = ", ".join(DIALECTS)
        msg = f"the broker does not support {sqlalchemy_dialect.name!r}; use one of {known}"
        raise SetupError(msg)
    module, _, name = home.rpartition(".")
    dialect: Dialect = getattr(import_module(module), name)(tables, sqlalchemy_dialect)
    return dialect
