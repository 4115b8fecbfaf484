"""The broker's tables, kept from test to test where nothing has changed them.

To create them costs a server 5 to 25 ms of CPU, and the test as much again. A test whose fixtures
create the usual tables first (`CREATING`) finds them there: empty, and their numbers start anew. If
the test before changed a table, an index, a trigger or a right, or left statistics of PostgreSQL,
the database is made empty, and the tables are new.
"""

import re
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import OperationalError, ProgrammingError

from tests.quick_tables import TABLES, QuickTables

CREATING = frozenset({"broker", "store", "rig", "fleet"})
"""Fixtures that create the usual tables in the empty database before anything else happens."""
EMPTIED = [table.fullname for table in TABLES.broker_tables]
"""Those in which a test may leave rows."""
VERSION = TABLES.version.fullname
FINGERPRINT = """
SELECT md5(string_agg(each, ',' ORDER BY each)) FROM (
    SELECT 'class' || oid || '.' || xmin FROM pg_class WHERE oid >= 16384
    UNION ALL SELECT 'column' || attrelid || '.' || attnum || '.' || xmin
        FROM pg_attribute WHERE attrelid >= 16384
    UNION ALL SELECT 'constraint' || oid || '.' || xmin FROM pg_constraint WHERE oid >= 16384
    UNION ALL SELECT 'trigger' || oid || '.' || xmin FROM pg_trigger
    UNION ALL SELECT 'policy' || oid || '.' || xmin FROM pg_policy
    UNION ALL SELECT 'routine' || oid || '.' || xmin FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT 'type' || oid || '.' || xmin FROM pg_type WHERE oid >= 16384
    UNION ALL SELECT 'schema' || oid || '.' || xmin FROM pg_namespace
    UNION ALL SELECT 'rights' || oid || '.' || xmin FROM pg_default_acl
    UNION ALL SELECT 'event' || oid || '.' || xmin FROM pg_event_trigger
    UNION ALL SELECT 'publication' || oid || '.' || xmin FROM pg_publication
    UNION ALL SELECT 'extension' || oid || '.' || xmin FROM pg_extension
    UNION ALL SELECT 'settings' || setrole || '.' || xmin FROM pg_db_role_setting
        WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
    UNION ALL SELECT 'statistics' || starelid || '.' || staattnum
        FROM pg_statistic WHERE starelid >= 16384
    UNION ALL SELECT 'version' || version_num FROM {version}
) AS seen (each)
"""
"""PostgreSQL writes a row of its catalogs anew, with a new xmin, whenever something changes."""

FEW = 16_384
"""Bytes of a table of PostgreSQL whose rows are deleted: two pages."""
GROWN = " UNION ALL ".join(
    f"SELECT '{table}' WHERE pg_relation_size('{table}') > {FEW}" for table in EMPTIED
)
"""Tables of PostgreSQL that have more, or had."""
DELETE = "; ".join(
    [
        f"LOCK TABLE {', '.join(EMPTIED)} IN EXCLUSIVE MODE",
        *(f"DELETE FROM {table}" for table in EMPTIED),
        "SELECT setval('message_id_seq', 1, false)",
    ]
)
"""Costs less than a TRUNCATE, which makes new files of a table and its indexes, and changes the
catalogs. The lock waits for sessions that have been ended, and may still commit."""
MYSQL_FINGERPRINT = """
SELECT table_name, table_type FROM information_schema.tables WHERE table_schema = '{name}'
UNION ALL SELECT 'routine', routine_name
    FROM information_schema.routines WHERE routine_schema = '{name}'
UNION ALL SELECT 'event', event_name FROM information_schema.events WHERE event_schema = '{name}'
UNION ALL SELECT default_character_set_name, default_collation_name
    FROM information_schema.schemata WHERE schema_name = '{name}'
UNION ALL SELECT 'version', version_num FROM {name}.{version}
"""
"""What else than triggers and the tables' definitions a test may have changed in a database of
MySQL or MariaDB."""


class KeptTables:
    """Those of all databases, by their names; of SQLite it is a file that is copied."""

    def __init__(
        self, quick: QuickTables, make: Callable[[Connection], object] | None = None
    ) -> None:
        """`make` makes them in an empty database of a server; else the usual ones are made."""
        self._quick = quick
        self._make = make or (lambda connection: quick(connection, TABLES))
        self._fingerprints: dict[str, str] = {}

    def copy_to(self, file: Path, template: Path) -> None:
        """Make `file` a new database of SQLite with the tables."""
        if not template.exists():
            engine = create_engine(f"sqlite:///{template}")
            with engine.begin() as connection:
                self._quick(connection, TABLES)
            engine.dispose()
        file.write_bytes(template.read_bytes())
        self._quick.there.add(str(file))

    def forget(self, name: str) -> None:
        """What the last test with the database `name` found there, and did not ask for, is past."""
        self._quick.there.discard(name)

    def empty(self, engine: Engine, name: str) -> bool:
        """Whether the tables of the database `name` are as they were made; they are empty now.

        The engine may be on another database of the same server, but not of PostgreSQL.
        """
        before = self._fingerprints.pop(name, None)
        if before is None:
            return False
        with engine.connect() as connection:
            found, used = self._seen(connection, name)
            if found != before:
                return False
            if connection.dialect.name == "postgresql":
                if used:
                    connection.exec_driver_sql(f"TRUNCATE {', '.join(used)}")
                    found, _ = self._seen(connection, name)  # which emptying changes
                connection.exec_driver_sql(DELETE)
            else:
                for table in filter(used.__contains__, EMPTIED):
                    # Only the messages have numbers, and a TRUNCATE makes a table anew.
                    way = "TRUNCATE" if table == "message" else "DELETE FROM"
                    connection.exec_driver_sql(f"{way} {name}.{table}")
        self._keep(found, name)
        return True

    def create(self, inside: Engine, name: str) -> None:
        """Create them in the empty database `name`."""
        with inside.connect() as connection:
            self._make(connection)
            self._keep(self._seen(connection, name)[0], name)

    def _keep(self, fingerprint: str | None, name: str) -> None:
        if fingerprint is not None:
            self._fingerprints[name] = fingerprint
        self._quick.there.add(name)

    def _seen(self, connection: Connection, name: str) -> tuple[str | None, set[str]]:
        """What changes with whatever a test changes, and the tables that are not as new (of
        PostgreSQL those that have grown); None if the tables are not all there."""
        try:
            if connection.dialect.name == "postgresql":
                found = connection.exec_driver_sql(FINGERPRINT.format(version=VERSION)).scalar_one()
                return str(found), set(connection.exec_driver_sql(GROWN).scalars())
            return self._seen_by_mysql(connection, name)
        except (OperationalError, ProgrammingError):
            return None, set()

    def _seen_by_mysql(self, connection: Connection, name: str) -> tuple[str | None, set[str]]:
        there = connection.exec_driver_sql(
            MYSQL_FINGERPRINT.format(name=name, version=VERSION)
        ).all()
        seen = [repr(row) for row in sorted(there, key=repr)]
        seen.append(repr(connection.exec_driver_sql(f"SHOW TRIGGERS FROM {name}").all()))
        rows = (f"(SELECT '{table}' FROM {name}.{table} LIMIT 1)" for table in EMPTIED)
        used = set(connection.exec_driver_sql(" UNION ALL ".join(rows)).scalars())
        for table in (*EMPTIED, VERSION):
            _, made = connection.exec_driver_sql(f"SHOW CREATE TABLE {name}.{table}").one()
            made, numbered = re.subn(r" AUTO_INCREMENT=\d+", "", made)
            seen.append(made)
            if numbered:
                used.add(table)
        return repr(seen), used
