"""The dialect of each database."""

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
"""The path of each database's class; a process imports only its own."""

__all__ = ("DIALECTS", "Dialect", "create_dialect")


def create_dialect(sqlalchemy_dialect: Any, tables: Tables) -> Dialect:
    """Create the dialect of an engine over `tables`.

    Raises:
        SetupError: the database is not supported.
    """
    path = DIALECTS.get(sqlalchemy_dialect.name)
    if path is None:
        supported = ", ".join(DIALECTS)
        msg = f"the broker does not support {sqlalchemy_dialect.name!r}; use one of {supported}"
        raise SetupError(msg)
    module, _, name = path.rpartition(".")
    dialect: Dialect = getattr(import_module(module), name)(tables, sqlalchemy_dialect)
    return dialect
