"""The broker's tables, kept from test to test where nothing has changed them.

To create them costs a server 5 to 25 ms of CPU, and the test as much again. A test whose fixtures
create the usual tables first (`CREATING`) finds them there: empty, and their numbers start anew. If
the test before changed a table, an index, a trigger or a right, or left statistics of PostgreSQL,
the database is made empty, and the tables are new.
"""

import re
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text

from tests.quick_tables import TABLES, QuickTables

CREATING = frozenset({"broker", "store", "rig", "fleet"})
"""Fixtures that create the usual tables in the empty database before anything else happens."""
EMPTIED = [table.fullname for table in TABLES.ours]
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

MYSQL_QUERIES = (
    "SHOW TRIGGERS",
    "SHOW VARIABLES LIKE 'c%_database'",
    "SELECT routine_name FROM information_schema.routines WHERE routine_schema = DATABASE()",
    "SELECT event_name FROM information_schema.events WHERE event_schema = DATABASE()",
    f"SELECT * FROM {VERSION}",
)
"""What else a test may have left in a database of MySQL or MariaDB."""


class KeptTables:
    """Those of all databases, by their names; of SQLite it is a file that is copied."""

    def __init__(self, quick: QuickTables) -> None:
        self._quick = quick
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

    def empty(self, inside: Engine, name: str) -> bool:
        """Whether the tables of the database `name` are as they were made; they are empty now."""
        before = self._fingerprints.pop(name, None)
        if before is None:
            return False
        with inside.connect() as connection:
            if self._fingerprint(connection) != before:
                return False
            self._truncate(connection)
            self._keep(connection, name)
        return True

    def create(self, inside: Engine, name: str) -> None:
        """Create them in the empty database `name`."""
        with inside.connect() as connection:
            self._quick(connection, TABLES)
            self._keep(connection, name)

    def _keep(self, connection: Connection, name: str) -> None:
        found = self._fingerprint(connection)
        if found is not None:
            self._fingerprints[name] = found
        self._quick.there.add(name)

    def _truncate(self, connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"TRUNCATE {', '.join(EMPTIED)} RESTART IDENTITY"))
            return
        for table in EMPTIED:
            connection.execute(text(f"TRUNCATE {table}"))

    def _fingerprint(self, connection: Connection) -> str | None:
        """What changes with whatever a test changes; None if the tables are not all there."""
        if connection.dialect.name == "postgresql":
            there = connection.scalar(text(f"SELECT to_regclass('public.{VERSION}')"))
            query = text(FINGERPRINT.format(version=VERSION))
            return str(connection.scalar(query)) if there else None
        tables = connection.execute(text("SHOW FULL TABLES")).all()
        if {name for name, _ in tables} != {*EMPTIED, VERSION}:
            return None
        seen: list[Any] = [connection.execute(text(query)).all() for query in MYSQL_QUERIES]
        for table in (*EMPTIED, VERSION):
            made = connection.execute(text(f"SHOW CREATE TABLE {table}")).one()[1]
            seen.append(re.sub(r" AUTO_INCREMENT=\d+", "", made))
        return repr(seen)
