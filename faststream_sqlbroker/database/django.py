"""Django's own connection as a connection of SQLAlchemy, for statements in Django's transaction.

Nothing of Django is imported: what is asked of its connection is written below. The transaction
stays Django's: what SQLAlchemy would commit, roll back or close, it does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

from sqlalchemy import URL, Connection
from sqlalchemy.engine import Engine
from sqlalchemy.pool import StaticPool
from typing_extensions import override

from faststream_sqlbroker.exceptions import SetupError

_DRIVERS = {
    "psycopg": "postgresql+psycopg",
    "psycopg2": "postgresql+psycopg2",
    "MySQLdb": "mysql+mysqldb",
    "pymysql": "mysql+pymysql",
    "sqlite3": "sqlite+pysqlite",
}
"""SQLAlchemy's names of the drivers that Django's connections may have, by their module."""


def is_django(connection: Any) -> bool:
    """Whether `connection` is one of `django.db.connections`."""
    return hasattr(connection, "ensure_connection") and hasattr(connection, "settings_dict")


class _Held:
    """The driver's connection; its transaction and its end are Django's."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


class _HeldPool(StaticPool):
    """Gives the one connection, and ends none."""

    @override
    def dispose(self) -> None:
        pass


@contextmanager
def connected(django: Any) -> Iterator[Connection]:
    """A connection of SQLAlchemy in the transaction of the Django connection `django`.

    If Django is in no transaction, there is one for the length of the block.

    Raises:
        SetupError: its driver is none that SQLAlchemy knows.
    """
    django.validate_thread_sharing()
    django.ensure_connection()
    # As Django's own cursor does: after an error the rest of the block would be lost silently.
    django.validate_no_broken_transaction()
    with _transaction(django):
        # Only now: an outermost block may have opened the connection anew.
        driver = django.connection
        engine = _engine_of(driver)
        with engine.connect() as connection:
            yield connection


def _transaction(django: Any) -> Any:
    """Several statements are written together, also where Django commits each by itself."""
    if django.in_atomic_block or not django.get_autocommit():
        return nullcontext()
    return import_module("django.db.transaction").atomic(using=django.alias)


def _engine_of(driver: Any) -> Engine:
    """An engine whose only connection is `driver`. Nothing is asked of the server."""
    name = url_of(driver)
    kind: Any = name.get_dialect()
    dialect = kind(dbapi=kind.import_dbapi())
    pool = _HeldPool(lambda: _Held(driver), reset_on_return=None, dialect=dialect)
    return Engine(pool, dialect, name)


def url_of(driver: Any) -> URL:
    """SQLAlchemy's URL of the driver's connection: without host, user and database.

    Raises:
        SetupError: SQLAlchemy does not know the driver.
    """
    modules = [each.__module__.partition(".")[0] for each in type(driver).__mro__]
    for module in modules:
        if module in _DRIVERS:
            return URL.create(_DRIVERS[module])
    raise SetupError(
        f"Django's connection is one of {modules[0]!r}, which is no driver that SqlProducer can "
        f"use: use one of {', '.join(_DRIVERS)}"
    )
