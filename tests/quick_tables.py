"""Tables for a test in a few milliseconds: `create_all` spends most of its 100 ms on looks at what
is there.

The first time, in each process of the tests, for each kind of database and each set of names,
`create_all` itself creates them; its statements are repeated wherever none of these tables is
there. tests/schema uses `create_all`.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

from sqlalchemy import Connection, event, inspect, text

from faststream_sqlbroker.broker import broker
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import Tables, build_tables
from faststream_sqlbroker.schema.types import MYSQL, is_mariadb

LOOKS = ("SELECT", "SHOW", "PRAGMA", "DO ")
"""How the statements begin that create nothing."""
TABLES = build_tables(SqlBrokerSchemaConfig())
"""Those of the usual names."""


@cache
def built(config: SqlBrokerSchemaConfig, dialect_name: str | None = None) -> Tables:
    """Stands in for `build_tables` and `Tables.for_dialect`: thousands of brokers have the same
    tables, and nothing changes them."""
    return build_tables(config, dialect_name=dialect_name)


def keep_built() -> None:
    """Let `built` stand in, in this process and its forks, for good."""
    patched: tuple[tuple[object, str, Any], ...] = (
        (broker, "build_tables", built),
        (Tables, "for_dialect", lambda own, name: built(own.config, name)),
    )
    for owner, name, replacement in patched:
        setattr(owner, name, replacement)


class QuickTables:
    """Stands in for `create_all`."""

    def __init__(self) -> None:
        self._statements: dict[Hashable, list[tuple[str, Any]]] = {}
        self.there: set[str] = set()
        """Names of databases in which the usual tables are already, for the first that asks."""

    def __call__(self, connection: Connection, tables: Tables) -> None:
        names = tuple(
            t.fullname
            for t in (*tables.for_dialect(connection.dialect.name).broker_tables, tables.version)
        )
        database = str(connection.engine.url.database)
        if database in self.there:
            self.there.remove(database)
            if tables.config == TABLES.config:
                return
        # A driver has its own way to write binds.
        key = (
            connection.dialect.name,
            connection.dialect.driver,
            is_mariadb(connection.dialect),
            tables.config,
        )
        if _any_there(connection, tables, names):
            create_all(connection, tables)
            return
        if key not in self._statements:
            self._statements[key] = self._watched(connection, tables, names)
            return
        for statement, binds in self._statements[key]:
            connection.exec_driver_sql(statement, binds)

    def _watched(
        self, connection: Connection, tables: Tables, names: tuple[str, ...]
    ) -> list[tuple[str, Any]]:
        sent: list[tuple[str, Any]] = []

        def watch(
            _c: Any, _cursor: Any, statement: str, binds: Any, _context: Any, _many: bool
        ) -> None:
            if not statement.lstrip().upper().startswith(LOOKS):
                sent.append((statement, binds))

        event.listen(connection, "before_cursor_execute", watch)
        try:
            create_all(connection, tables)
        finally:
            event.remove(connection, "before_cursor_execute", watch)
        if connection.dialect.name not in MYSQL:
            return sent
        # One statement a table, with its indexes: DDL is slow there.
        made = [connection.execute(text(f"SHOW CREATE TABLE `{name}`")).one()[1] for name in names]
        rest = [each for each in sent if each[0].lstrip().upper().startswith(("INSERT", "DELETE"))]
        return [*((statement.replace("%", "%%"), ()) for statement in made), *rest]


def _any_there(connection: Connection, tables: Tables, names: tuple[str, ...]) -> bool:
    there = inspect(connection).get_table_names(schema=tables.message.schema)
    return bool(
        {name.rpartition(".")[2].lower() for name in names} & {name.lower() for name in there}
    )
