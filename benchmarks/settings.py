"""Settings of the databases on which a speed depends, and which of them lose no commit."""

import os
import sqlite3
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import create_engine, text

from faststream_sqlbroker import SqlBrokerSchemaConfig
from faststream_sqlbroker.database.dialects import create_dialect
from faststream_sqlbroker.schema.tables import build_tables
from tools.servers import VARIABLES

Settings = dict[str, str]
_INNODB = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'innodb_flush_log_at_trx_commit', "
    "'sync_binlog', 'innodb_buffer_pool_size', 'log_bin', 'datadir')"
)
_QUERIES = {
    "postgresql": "SELECT name, setting FROM pg_settings WHERE name IN ('server_version', 'fsync', "
    "'synchronous_commit', 'shared_buffers', 'autovacuum', 'wal_level', 'full_page_writes', "
    "'data_directory')",
    "mariadb": _INNODB,
    "mysql": _INNODB,
}
_BINLOG = {"innodb_flush_log_at_trx_commit": "1", "log_bin": "ON", "sync_binlog": "1"}
DURABLE: Mapping[str, Mapping[str, str]] = {
    "postgresql": {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"},
    "mariadb": _BINLOG,
    "mysql": _BINLOG,
    "sqlite": {"synchronous": "FULL"},
}
"""What each database must have, so that a crash of the machine loses no commit."""
IN_MEMORY = ("tmpfs", "ramfs")
SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")
PEERS_SYNCHRONOUS = "BENCHMARK_SYNCHRONOUS"
"""The variable with SQLite's `synchronous` of peers; the broker sets its own."""


def settings() -> dict[str, Settings]:
    """Those of every configured server and of SQLite."""
    kinds = (kind for kind, variable in VARIABLES.items() if variable in os.environ)
    return {**{kind: _of_server(kind) for kind in kinds}, "sqlite": _of_sqlite()}


def problems(databases: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Why commits of these databases may be lost; each line names a setting."""
    lines = []
    for kind, of in databases.items():
        for name, wanted in DURABLE[kind].items():
            value = of.get(name, "unknown")
            if value != wanted:
                lines.append(f"{kind} has {name} = {value}, not {wanted}")
        if of.get("filesystem") in IN_MEMORY:
            lines.append(f"{kind} has its files on {of['filesystem']}, in memory")
    return lines


def _of_server(kind: str) -> Settings:
    engine = create_engine(os.environ[VARIABLES[kind]])
    with engine.connect() as connection:
        rows = connection.execute(text(_QUERIES[kind])).all()
    engine.dispose()
    shown = {name: str(value) for name, value in rows}
    for name in ("data_directory", "datadir"):
        if name in shown:
            shown["filesystem"] = filesystem(Path(shown.pop(name)))
    return shown


def _of_sqlite() -> Settings:
    """As in a transaction of the broker."""
    with tempfile.TemporaryDirectory() as folder:
        engine = create_engine(f"sqlite:///{Path(folder) / 'settings.db'}")
        dialect = create_dialect(engine.dialect, build_tables(SqlBrokerSchemaConfig()))
        with engine.connect() as connection:
            dialect.begin(connection)
            value = connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
        engine.dispose()
        return {
            "version": sqlite3.sqlite_version,
            "synchronous": SYNCHRONOUS[value],
            "filesystem": filesystem(Path(folder)),
        }


def filesystem(folder: Path) -> str:
    """The kind of file system of `folder`; "unknown" if it is not on this machine."""
    try:
        folder = folder.resolve(strict=True)
        mounts = Path("/proc/mounts").read_text()
    except OSError:
        return "unknown"
    kinds = {Path(line.split()[1]): line.split()[2] for line in mounts.splitlines()}
    at = next((path for path in (folder, *folder.parents) if path in kinds), None)
    return "unknown" if at is None else kinds[at]
