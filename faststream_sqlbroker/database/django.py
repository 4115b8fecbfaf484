"""Use a Django connection as an SQLAlchemy connection, for statements in Django's transaction.

Nothing of Django is imported: the few attributes of its connection that are used are below. Django
keeps control of the transaction: commits, rollbacks and closes by SQLAlchemy have no effect.
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
"""SQLAlchemy's driver names by the driver modules that Django's connections may have."""


def is_django_connection(connection: Any) -> bool:
    """Return True if `connection` is from `django.db.connections`."""
    return hasattr(connection, "ensure_connection") and hasattr(connection, "settings_dict")


class _BorrowedConnection:
    """The driver's connection, which Django commits, rolls back and closes."""

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


class _BorrowedPool(StaticPool):
    """A pool with a single connection, which is never closed here."""

    @override
    def dispose(self) -> None:
        pass


@contextmanager
def open_connection(django: Any) -> Iterator[Connection]:
    """Open an SQLAlchemy connection in the transaction of the Django connection `django`.

    If Django is in no transaction, one is opened for the length of the block.

    Raises:
        SetupError: SQLAlchemy does not know the driver.
    """
    django.validate_thread_sharing()
    django.ensure_connection()
    # Django's own cursor checks this, too: after an error the rest of the block would be lost
    # silently.
    django.validate_no_broken_transaction()
    with _begin_transaction(django):
        # Read the driver only now: an outermost block may have reopened the connection.
        driver = django.connection
        engine = _create_engine(driver)
        with engine.connect() as connection:
            yield connection


def _begin_transaction(django: Any) -> Any:
    """Return Django's `atomic` block if Django is in no transaction, otherwise an empty context.

    In autocommit mode Django would commit each statement separately.
    """
    if django.in_atomic_block or not django.get_autocommit():
        return nullcontext()
    return import_module("django.db.transaction").atomic(using=django.alias)


def _create_engine(driver: Any) -> Engine:
    """Create an engine that runs statements in the transaction of Django's `driver`.

    `driver` is its only connection. Nothing is sent to the server. The pool ignores commits,
    rollbacks and closes: they are Django's.
    """
    url = get_driver_url(driver)
    dialect_class: Any = url.get_dialect()
    dialect = dialect_class(dbapi=dialect_class.import_dbapi())
    pool = _BorrowedPool(lambda: _BorrowedConnection(driver), reset_on_return=None, dialect=dialect)
    return Engine(pool, dialect, url)


def get_driver_url(driver: Any) -> URL:
    """Return SQLAlchemy's URL of the driver's connection, without host, user and database.

    Raises:
        SetupError: SQLAlchemy does not know the driver.
    """
    modules = [base.__module__.partition(".")[0] for base in type(driver).__mro__]
    for module in modules:
        if module in _DRIVERS:
            return URL.create(_DRIVERS[module])
    raise SetupError(
        f"SqlProducer does not support the driver {modules[0]!r} of Django's connection; use one "
        f"of {', '.join(_DRIVERS)}"
    )
