"""Create and upgrade the tables: directly for development, with Alembic for production."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event, inspect, text

from faststream_sqlbroker.exceptions import MissingExtraError, SchemaError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.functions import install_functions
from faststream_sqlbroker.schema.partitions import check_dialect, is_partitioned
from faststream_sqlbroker.schema.tables import (
    Tables,
    build_default_partition,
    build_storage_options,
    build_tables,
    list_indexes,
)
from faststream_sqlbroker.schema.triggers import build_notify_trigger, create_notify_trigger
from faststream_sqlbroker.schema.types import MYSQL
from faststream_sqlbroker.schema.validate import disable_type_quotes, find_foreign_tables

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

HEAD = "0001"
"""The latest version in `versions/`."""
MIGRATION_DIALECTS = ("postgresql", "mysql", "sqlite")
"""Dialects with a folder under `migrations/`; MariaDB uses MySQL's."""


def create_all(connection: Connection, tables: Tables) -> None:
    """Create missing tables and indexes; for development and tests.

    Existing tables keep their columns; `find_differences` returns the missing columns.

    Raises:
        SchemaError: a table of that name belongs to another program.
    """
    check_dialect(connection.dialect.name, tables.config)
    # Lock before any read: on MySQL a transaction that has read a table holds its metadata lock.
    # Waiting here with that lock would block the DDL of the process that holds this lock.
    _lock_creation(connection)
    disable_type_quotes(connection)
    _check_foreign_tables(connection, tables)
    is_new = not inspect(connection).has_table(tables.message.name, schema=tables.message.schema)
    for table in tables.for_dialect(connection.dialect.name).broker_tables:
        table.create(connection, checkfirst=True)
        columns = {
            column["name"]
            for column in inspect(connection).get_columns(table.name, schema=table.schema)
        }
        for index in list_indexes(table):
            if columns.issuperset(column.name for column in index.columns):
                index.create(connection, checkfirst=True)
    if connection.dialect.name == "postgresql":
        _create_for_postgresql(connection, tables)
    create_notify_trigger(connection, tables)
    if tables.config.sql_functions:
        install_functions(connection, tables.config)
    tables.version.create(connection, checkfirst=True)
    if is_new:
        # MySQL with sql_safe_updates refuses a DELETE without a key in its WHERE.
        connection.execute(tables.version.delete().where(tables.version.c.version_num > ""))
        connection.execute(tables.version.insert().values(version_num=HEAD))


def _check_foreign_tables(connection: Connection, tables: Tables) -> None:
    if foreign := find_foreign_tables(connection, tables):
        raise SchemaError("; ".join(foreign))


def _create_for_postgresql(connection: Connection, tables: Tables) -> None:
    """Set the storage parameters, and create the DEFAULT partition of a partitioned archive.

    The DEFAULT partition takes the rows for whose time there is no other.
    """
    connection.execute(build_storage_options(tables.message))
    archive = tables.archive if tables.config.archive_partitions is not None else None
    if archive is not None and is_partitioned(connection, archive):
        connection.execute(build_default_partition(archive))


def _lock_creation(connection: Connection) -> None:
    """Let only a single process create tables at a time, until its transaction ends.

    The race: workers that start together would all find no table, and all create it. SQLite needs
    no lock here, because BEGIN IMMEDIATE lets one transaction write at a time.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('faststream_sqlbroker'))"))
    elif connection.dialect.name in MYSQL:
        connection.execute(text("SELECT GET_LOCK('faststream_sqlbroker', 30)"))
        # MySQL's lock belongs to the connection, so it does not end with the transaction by itself.
        event.listen(connection, "commit", _release_creation_lock, once=True)
        event.listen(connection, "rollback", _release_creation_lock, once=True)


def _release_creation_lock(connection: Connection) -> None:
    connection.exec_driver_sql("DO RELEASE_ALL_LOCKS()")


def upgrade(connection: Connection, config: SqlBrokerSchemaConfig | None = None) -> None:
    """Upgrade the tables to this version with the migrations shipped in the package.

    Runs in the transaction of `connection` (MySQL and MariaDB commit after each statement).

    Raises:
        SchemaError: a table of that name belongs to another program.
        MissingExtraError: Alembic is not installed.
    """
    config = config or SqlBrokerSchemaConfig()
    check_dialect(connection.dialect.name, config)
    _check_foreign_tables(connection, build_tables(config))
    migrate(config, connection=connection)
    create_notify_trigger(connection, build_tables(config))
    if config.sql_functions:
        install_functions(connection, config)


def list_versions() -> dict[str, str]:
    """Return the migrations, oldest first: the version, and the file name without the suffix.

    Raises:
        MissingExtraError: Alembic is not installed.
    """
    _, script = _load_script()
    steps = reversed(list(script.walk_revisions()))
    return {step.revision: Path(step.path).stem for step in steps}


def render_migrations(
    dialect_name: str,
    config: SqlBrokerSchemaConfig | None = None,
    *,
    since: str | None = None,
    to: str = "head",
) -> str:
    """Return the migrations as readable SQL for postgresql, mysql or sqlite, without a connection.

    Args:
        dialect_name: The database.
        config: Names of the tables.
        since: Current version of the tables; None if there are no tables.
        to: The version to reach.

    Raises:
        MissingExtraError: Alembic is not installed.
    """
    out = io.StringIO()
    config = config or SqlBrokerSchemaConfig()
    migrate(config, dialect_name=dialect_name, out=out, since=since, to=to)
    if config.notify_trigger and dialect_name == "postgresql":
        out.write(
            "".join(f"{statement};\n\n" for statement in build_notify_trigger(build_tables(config)))
        )
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
    """Run the migrations up to `to`, or write the SQL to `out`.

    Give `connection` to run them, or `dialect_name` and `out` to write them. They start after the
    current version, or after `since`.
    """
    alembic_config, script = _load_script()
    from alembic.runtime.environment import EnvironmentContext  # noqa: PLC0415

    def get_steps(revision: Any, _context: Any) -> Any:
        return script._upgrade_revs(to, revision)  # noqa: SLF001 - like alembic.command.upgrade

    context = EnvironmentContext(
        alembic_config,
        script,
        fn=get_steps,
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


def _load_script() -> "tuple[Config, ScriptDirectory]":
    """Return Alembic's configuration, and the package's migrations.

    Alembic is the library that runs them.

    Raises:
        MissingExtraError: Alembic is not installed.
    """
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
