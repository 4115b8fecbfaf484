"""Create and upgrade the tables: at once for development, by Alembic's versions for production."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event, inspect, text

from faststream_sqlbroker.exceptions import MissingExtraError, SchemaError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.functions import install_functions
from faststream_sqlbroker.schema.partitions import is_partitioned, need_postgresql
from faststream_sqlbroker.schema.tables import (
    Tables,
    build_tables,
    default_partition_of,
    sorted_indexes,
    storage_of,
)
from faststream_sqlbroker.schema.triggers import create_notify_trigger, notify_trigger
from faststream_sqlbroker.schema.types import MYSQL
from faststream_sqlbroker.schema.validate import foreign_tables, name_types_plainly

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

HEAD = "0001"
"""The newest version in `versions/`."""
MIGRATED = ("postgresql", "mysql", "sqlite")
"""Dialects with a folder under `migrations/`; MariaDB's is MySQL's."""


def create_all(connection: Connection, tables: Tables) -> None:
    """Create what is missing of the tables and their indexes; for development and tests.

    Existing tables keep their columns; `differences` tells which are missing.

    Raises:
        SchemaError: a table of that name belongs to another program.
    """
    need_postgresql(connection.dialect.name, tables.config)
    # Before any read: on MySQL a transaction that has read a table holds its metadata lock. If it
    # then waited here, it would block the DDL of the process that holds this lock.
    _one_at_a_time(connection)
    name_types_plainly(connection)
    _refuse_foreign(connection, tables)
    fresh = not inspect(connection).has_table(tables.message.name, schema=tables.message.schema)
    for table in tables.for_dialect(connection.dialect.name).ours:
        table.create(connection, checkfirst=True)
        columns = {
            each["name"]
            for each in inspect(connection).get_columns(table.name, schema=table.schema)
        }
        for index in sorted_indexes(table):
            if columns.issuperset(column.name for column in index.columns):
                index.create(connection, checkfirst=True)
    if connection.dialect.name == "postgresql":
        _create_for_postgresql(connection, tables)
    create_notify_trigger(connection, tables)
    if tables.config.sql_functions:
        install_functions(connection, tables.config)
    tables.version.create(connection, checkfirst=True)
    if fresh:
        # By its key: MySQL under sql_safe_updates refuses a DELETE without one.
        connection.execute(tables.version.delete().where(tables.version.c.version_num > ""))
        connection.execute(tables.version.insert().values(version_num=HEAD))


def _refuse_foreign(connection: Connection, tables: Tables) -> None:
    if foreign := foreign_tables(connection, tables):
        raise SchemaError("; ".join(foreign))


def _create_for_postgresql(connection: Connection, tables: Tables) -> None:
    connection.execute(storage_of(tables.message))
    archive = tables.archive if tables.config.archive_partitions is not None else None
    if archive is not None and is_partitioned(connection, archive):
        connection.execute(default_partition_of(archive))


def _one_at_a_time(connection: Connection) -> None:
    """Let one process create tables at a time.

    The race: workers that start together would all find no table, and all create it. SQLite needs
    no lock here, because BEGIN IMMEDIATE lets one transaction write at a time.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('faststream_sqlbroker'))"))
    elif connection.dialect.name in MYSQL:
        connection.execute(text("SELECT GET_LOCK('faststream_sqlbroker', 30)"))
        event.listen(connection, "commit", _unlock, once=True)
        event.listen(connection, "rollback", _unlock, once=True)


def _unlock(connection: Connection) -> None:
    connection.exec_driver_sql("DO RELEASE_ALL_LOCKS()")


def upgrade(connection: Connection, config: SqlBrokerSchemaConfig | None = None) -> None:
    """Bring the tables to this version's with the migrations shipped in the package.

    Runs in the transaction of `connection` (MySQL and MariaDB commit after each statement).

    Raises:
        SchemaError: a table of that name belongs to another program.
        MissingExtraError: Alembic is not installed.
    """
    config = config or SqlBrokerSchemaConfig()
    need_postgresql(connection.dialect.name, config)
    _refuse_foreign(connection, build_tables(config))
    migrate(config, connection=connection)
    create_notify_trigger(connection, build_tables(config))
    if config.sql_functions:
        install_functions(connection, config)


def versions() -> dict[str, str]:
    """The migrations, oldest first: the version, and the name of its file without the ending.

    Raises:
        MissingExtraError: Alembic is not installed.
    """
    _, script = _script()
    steps = reversed(list(script.walk_revisions()))
    return {step.revision: Path(step.path).stem for step in steps}


def render(
    dialect_name: str,
    config: SqlBrokerSchemaConfig | None = None,
    *,
    since: str | None = None,
    to: str = "head",
) -> str:
    """The migrations as readable SQL for one of postgresql, mysql, sqlite; nothing is connected to.

    Args:
        dialect_name: The database.
        config: Names of the tables.
        since: The version that the tables have; None is none.
        to: The version that they are to have.

    Raises:
        MissingExtraError: Alembic is not installed.
    """
    out = io.StringIO()
    config = config or SqlBrokerSchemaConfig()
    migrate(config, dialect_name=dialect_name, out=out, since=since, to=to)
    if config.notify_trigger and dialect_name == "postgresql":
        out.write("".join(f"{each};\n\n" for each in notify_trigger(build_tables(config))))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def migrate(
    config: SqlBrokerSchemaConfig,
    *,
    connection: Connection | None = None,
    dialect_name: str | None = None,
    out: io.StringIO | None = None,
    since: str | None = None,
    to: str = "head",
) -> None:
    """Run the migrations after the version that is there, or `since`, up to `to`, or write them to
    `out`.
    """
    alembic_config, script = _script()
    from alembic.runtime.environment import EnvironmentContext  # noqa: PLC0415

    def steps(revision: Any, _context: Any) -> Any:
        return script._upgrade_revs(to, revision)  # noqa: SLF001 - what alembic.command.upgrade calls

    context = EnvironmentContext(
        alembic_config,
        script,
        fn=steps,
        as_sql=connection is None,
        starting_rev=since,
        destination_rev=to,
    )
    with context:
        context.configure(
            connection=connection,
            dialect_name=dialect_name,
            output_buffer=out,
            version_table=config.version_table_name,
            version_table_schema=config.schema,
            sqlbroker_config=config,
        )
        with context.begin_transaction():
            context.run_migrations()


def _script() -> "tuple[Config, ScriptDirectory]":
    try:
        from alembic.config import Config  # noqa: PLC0415
        from alembic.script import ScriptDirectory  # noqa: PLC0415
    except ImportError as error:
        msg = "migrations need Alembic: pip install 'sqlbroker[migrations]'"
        raise MissingExtraError(msg) from error
    config = Config()
    config.set_main_option("path_separator", "os")
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config, ScriptDirectory.from_config(config)
