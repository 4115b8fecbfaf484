"""Column types and the clock expressions of each database."""

import json
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    DateTime,
    Dialect,
    Integer,
    LargeBinary,
    String,
    Text,
    TypeDecorator,
    Uuid,
    cast,
    type_coerce,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import TypeEngine

from faststream_sqlbroker.core.times import from_microseconds, to_microseconds

MYSQL = ("mysql", "mariadb")
"""SQLAlchemy's names of the dialects of both databases. The name is that of the URL; mysql+… may
lead to either database."""


def is_mariadb(dialect: Any) -> bool:
    """Return True if the server is MariaDB, whatever the URL; known after the first connection."""
    return bool(getattr(dialect, "is_mariadb", False))


# SQLAlchemy's modules of a database take 50 ms to import, so import them only when needed.
def get_timestamp_type(dialect_name: str) -> TypeEngine[Any]:
    """Return the type of a timestamp in a database."""
    if dialect_name in MYSQL:
        from sqlalchemy.dialects.mysql import DATETIME  # noqa: PLC0415

        return DATETIME(fsp=6)
    return BigInteger() if dialect_name == "sqlite" else DateTime(timezone=True)


SQLITE_CLOCK = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"
"""Microseconds since 1970 (UTC), with a resolution of milliseconds; constant within a statement."""


class UtcTimestamp(TypeDecorator[datetime]):
    """A timestamp; Python sees aware datetimes in UTC only.

    PostgreSQL: timestamptz. MySQL and MariaDB: DATETIME(6) holding UTC. SQLite: integer
    microseconds since 1970 (UTC).

    Raises:
        ValueError: a naive datetime is bound.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the column's type in the database."""
        return dialect.type_descriptor(get_timestamp_type(dialect.name))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Convert an aware datetime to the database's value."""
        if value is None:
            return None
        if value.tzinfo is None:
            msg = f"a datetime must have a time zone, got {value!r}: use datetime.now(timezone.utc)"
            raise ValueError(msg)
        value = value.astimezone(timezone.utc)
        if dialect.name == "sqlite":
            return to_microseconds(value)
        return value.replace(tzinfo=None) if dialect.name in MYSQL else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Convert the database's value to an aware datetime in UTC."""
        if value is None:
            return None
        if dialect.name == "sqlite":
            return from_microseconds(value)
        aware: datetime = value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value
        return aware.astimezone(timezone.utc)


class BrokerJson(TypeDecorator[Any]):
    """JSON in the standard library's encoding; None is NULL.

    An engine's `json_serializer` and `json_deserializer` belong to the application: they may refuse
    the broker's values, or return objects of their own.
    """

    impl = JSON
    cache_ok = True

    def __init__(self) -> None:
        """Take no options: every column stores NULL for None."""
        super().__init__(none_as_null=True)

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], str | None]:  # noqa: ARG002
        """Encode without the engine's `json_serializer`."""
        return _encode_json

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:  # noqa: ARG002
        """Decode without the engine's `json_deserializer`."""
        return _decode_json


class BrokerJsonb(BrokerJson):
    """PostgreSQL's jsonb, which is selected as text."""

    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the column's type in the database."""
        from sqlalchemy.dialects.postgresql import JSONB  # noqa: PLC0415

        return dialect.type_descriptor(JSONB(none_as_null=True))

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Select text: asyncpg and psycopg decode jsonb with the engine's `json_deserializer`."""
        return type_coerce(cast(column, Text), self)


def _encode_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _decode_json(value: Any) -> Any:
    # SQLite stores and returns a JSON number as a number.
    return json.loads(value) if isinstance(value, str | bytes) else value


class clock(GenericFunction[datetime]):  # noqa: N801 - reads like SQLAlchemy's own func.now()
    """The database's clock at the start of the statement."""

    type = UtcTimestamp()
    inherit_cache = True
    _register = False


@compiles(clock)
def _render_clock(_element: clock, _compiler: Any, **_: Any) -> str:
    return "statement_timestamp()"


@compiles(clock, "mysql")
@compiles(clock, "mariadb")
def _render_clock_mysql(_element: clock, _compiler: Any, **_: Any) -> str:
    return "(UTC_TIMESTAMP(6))"


@compiles(clock, "sqlite")
def _render_clock_sqlite(_element: clock, _compiler: Any, **_: Any) -> str:
    return SQLITE_CLOCK


class later(GenericFunction[datetime]):  # noqa: N801 - as clock
    """The database's clock plus a number of microseconds."""

    type = UtcTimestamp()
    inherit_cache = True
    _register = False


@compiles(later)
def _render_later(element: later, compiler: Any, **options: Any) -> str:
    microseconds = compiler.process(element.clauses, **options)
    return f"statement_timestamp() + {microseconds} * interval '1 microsecond'"


@compiles(later, "mysql")
@compiles(later, "mariadb")
def _render_later_mysql(element: later, compiler: Any, **options: Any) -> str:
    return f"UTC_TIMESTAMP(6) + INTERVAL {compiler.process(element.clauses, **options)} MICROSECOND"


@compiles(later, "sqlite")
def _render_later_sqlite(element: later, compiler: Any, **options: Any) -> str:
    return f"{SQLITE_CLOCK} + {compiler.process(element.clauses, **options)}"


class MysqlVariant(TypeDecorator[Any]):
    """A type with a different type on MySQL and MariaDB."""

    impl: type[TypeEngine[Any]] = String
    cache_ok = True

    def get_mysql_type(self) -> TypeEngine[Any]:
        """Return the type for MySQL and MariaDB."""
        raise NotImplementedError

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the column's type in the database."""
        return self.get_mysql_type() if dialect.name in MYSQL else self.impl_instance


class NameType(MysqlVariant):
    """Text that is compared byte by byte: queue names are case sensitive on every database."""

    cache_ok = True

    def __init__(self, length: int) -> None:
        """Set the maximum length in characters."""
        super().__init__(length)
        self.length = length

    def get_mysql_type(self) -> TypeEngine[Any]:
        """Return a VARCHAR whose collation compares bytes."""
        from sqlalchemy.dialects.mysql import VARCHAR  # noqa: PLC0415

        return VARCHAR(self.length, charset="utf8mb4", collation="utf8mb4_bin")


class PayloadType(MysqlVariant):
    """Bytes without a limit."""

    impl = LargeBinary
    cache_ok = True

    def get_mysql_type(self) -> TypeEngine[Any]:
        """Return LONGBLOB: a BLOB without a length ends at 64 KiB in MySQL."""
        from sqlalchemy.dialects.mysql import LONGBLOB  # noqa: PLC0415

        return LONGBLOB()


class ErrorType(MysqlVariant):
    """Text without a limit."""

    impl = Text
    cache_ok = True

    def get_mysql_type(self) -> TypeEngine[Any]:
        """Return LONGTEXT: a TEXT without a length ends at 64 KiB in MySQL."""
        from sqlalchemy.dialects.mysql import LONGTEXT  # noqa: PLC0415

        return LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin")


# Only INTEGER PRIMARY KEY can be AUTOINCREMENT in SQLite.
IdType = BigInteger().with_variant(Integer(), "sqlite")
HeadersType = BrokerJson().with_variant(BrokerJsonb(), "postgresql")
# MariaDB's own UUID type would return dashes; all databases but PostgreSQL use one format.
TokenType = Uuid(native_uuid=False).with_variant(Uuid(native_uuid=True), "postgresql")
