"""Commands for the tables: show and run migrations, and add partitions on PostgreSQL."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from sqlalchemy import Connection, inspect, select

from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.admin.filters import get_operator_name
from faststream_sqlbroker.cli.output import AsJson, print_json, print_line, refuse_json
from faststream_sqlbroker.cli.shared_options import ChangeOptions
from faststream_sqlbroker.cli.target import get_target, run
from faststream_sqlbroker.core.text import pluralize
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.retention import add_partition
from faststream_sqlbroker.exceptions import SchemaError, SetupError
from faststream_sqlbroker.schema.functions import render_functions
from faststream_sqlbroker.schema.migrate import (
    HEAD,
    MIGRATION_DIALECTS,
    list_versions,
    render_migrations,
    upgrade,
)
from faststream_sqlbroker.schema.partitions import check_dialect, convert_archive, get_archive

Since = Annotated[
    str | None, typer.Option(help="Only migrations after this version; default: all.")
]


def sql(
    context: typer.Context,
    database: Annotated[
        str | None,
        typer.Option(
            help="postgresql, mysql (also for MariaDB) or sqlite; default: from --app or --url."
        ),
    ] = None,
    since: Since = None,
    to: Annotated[str, typer.Option(help="Last version to print.")] = "head",
    functions: Annotated[
        bool, typer.Option("--functions", help="Print the SQL functions instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the migrations, or the SQL functions, without connecting to the database."""
    target = get_target(context)
    if database is None or target.app is not None:
        broker = target.load_broker()
        config = broker._store.tables.config  # noqa: SLF001 - the same package
        kind = database or broker._store.dialect_name  # noqa: SLF001
    else:
        config = target.tables
        kind = database
    kind = _parse_dialect(kind)
    if functions:
        _print_sql({"functions": True}, render_functions(kind, config), as_json=as_json)
        return
    version_names = [*list_versions(), "head"]
    for option, value in (("--since", since), ("--to", to)):
        if value is not None and value not in version_names:
            raise SetupError(f"{option} must be one of {', '.join(version_names)}, got {value!r}")
    text = render_migrations(kind, config, since=since, to=to)
    last = HEAD if to == "head" else to
    _print_sql({"functions": False, "since": since, "to": last}, text, as_json=as_json)


def _print_sql(fields: Mapping[str, Any], sql: str, *, as_json: bool) -> None:
    """Print the SQL unchanged, for a file or a client of the database, or in a JSON object."""
    if as_json:
        print_json({**fields, "sql": sql})
    else:
        typer.echo(sql, nl=False)


def migrate(
    context: typer.Context,
    options: ChangeOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the SQL; change nothing.")
    ] = False,
) -> None:
    """Migrate the tables to the version of this package, or create them if they are missing.

    The audit records the migration.
    """
    if not (options.yes or dry_run):
        refuse_json(options.as_json)
    operator = get_operator_name(options.by)
    version, pending = run(context, _read_pending)
    done = bool(pending) and not dry_run
    if done:
        if not options.yes:
            print_line(pending)
            typer.confirm(f"Migrate from version {version or 'none'} to {HEAD}?", abort=True)
        run(context, lambda broker: _upgrade(broker, version, operator))
    if options.as_json:
        print_json({"from": version, "to": HEAD, "sql": pending, "done": done})
    else:
        typer.echo(_format_migration(version, pending, done=done), nl=False)


def _format_migration(version: str | None, pending: str, *, done: bool) -> str:
    """Format the result of `migrate`; for a dry run this is the SQL itself, for use in a file."""
    if done:
        return f"migrated the tables from version {version or 'none'} to {HEAD}\n"
    return pending or f"the tables are up to date at version {HEAD}\n"


async def _read_pending(broker: SqlBroker) -> tuple[str | None, str]:
    """Return the version of the tables, and the SQL that migrates them to this package's version.

    The version is None if there are no tables; the SQL is empty if the version is current.

    Raises:
        SchemaError: the tables are newer than the package, or an application migrates them.
    """
    config = broker._store.tables.config  # noqa: SLF001 - the same package
    async with broker.engine.connect() as connection:
        version = await connection.run_sync(_read_version, broker)
    if version == HEAD:
        return version, ""
    if version is not None and version not in list_versions():
        raise SchemaError(
            f"the tables have version {version}, but this package knows no version after {HEAD}: "
            "upgrade the package"
        )
    kind = _parse_dialect(broker._store.dialect_name)  # noqa: SLF001 - the same package
    return version, render_migrations(kind, config, since=version)


def _read_version(connection: Connection, broker: SqlBroker) -> str | None:
    """Return the recorded version of the tables, or None if the tables do not exist.

    Raises:
        SchemaError: the tables exist without a version, so an application migrates them.
    """
    tables = broker._store.tables  # noqa: SLF001 - the same package
    inspector = inspect(connection)
    if inspector.has_table(tables.version.name, schema=tables.version.schema):
        version = connection.execute(select(tables.version.c.version_num)).scalar()
        if version is not None:
            return str(version)
    if inspector.has_table(tables.message.name, schema=tables.message.schema):
        # The first migration would fail at the first table, without an explanation.
        raise SchemaError(
            f"the table {tables.message.fullname!r} exists, but {tables.version.fullname!r} has no "
            "version, so the migrations of your application created it: use them to change it "
            "(docs/howto/alembic.md)"
        )
    return None


async def _upgrade(broker: SqlBroker, version: str | None, by: str) -> None:
    """Run the pending migrations, and then record in the audit that `by` did so.

    Both are one transaction where the database can roll back changes of tables. `version` is that
    of the tables before; None if there were none.
    """
    store = broker._store  # noqa: SLF001 - the same package
    arguments = {"from": version, "to": HEAD}
    async with broker.engine.begin() as connection:
        await connection.run_sync(upgrade, store.tables.config)
        # After the upgrade, because the audit table may be new.
        await connection.run_sync(record_action, store.dialect, "migrate", by, arguments)


def _parse_dialect(name: str) -> str:
    """Return the dialect whose migrations `name` uses: for MariaDB, MySQL."""
    dialect = "mysql" if name == "mariadb" else name
    if dialect not in MIGRATION_DIALECTS:
        raise SetupError(
            f"--database must be one of {', '.join(MIGRATION_DIALECTS)} or mariadb, got {name!r}"
        )
    return dialect


def partitions(
    context: typer.Context,
    options: ChangeOptions,
    every: Annotated[
        str | None, typer.Option(help="day, week or month; default: the setting of --app.")
    ] = None,
    convert: Annotated[
        bool, typer.Option("--convert", help="Convert an archive without partitions.")
    ] = False,
) -> None:
    """Add missing partitions to the archive (PostgreSQL; run as the owner of the archive).

    --convert first builds a unique index, which takes as long as reading the archive; messages can
    still be archived while it runs.
    """
    if convert and not options.yes:
        run(context, lambda broker: _get_partitioned_config(broker, every))
        options.confirm("partitions: convert the archive to a partitioned table")
    converted, added = run(
        context, lambda broker: _add_partitions(broker, every, options.by, convert=convert)
    )
    headline = ["the archive is now partitioned"] if converted else []
    result = {"converted": converted, "added": added}
    options.print_result(result, *headline, f"{pluralize(len(added), 'partitions')} added", *added)


async def _get_partitioned_config(broker: SqlBroker, every: str | None) -> SqlBrokerSchemaConfig:
    """Return the configuration of the tables, with the partition length of `--every` if given.

    Also called before the question, so that the user is not asked about what cannot be done.

    Raises:
        SetupError: `every` is not valid, or the database has no partitions.
    """
    config = broker._store.tables.config  # noqa: SLF001 - the same package
    if every is not None:
        config = replace(config, archive_partitions=every)
    check_dialect(broker.engine.dialect.name, config)
    get_archive(config)
    return config


async def _add_partitions(
    broker: SqlBroker, every: str | None, by: str | None, *, convert: bool
) -> tuple[bool, list[str]]:
    """Convert the archive if requested, and add missing partitions, each in a transaction.

    An interrupted command leaves complete partitions; the next one adds the rest.

    Returns:
        True if the archive was converted by this call, and the names of the added partitions.
    """
    operator = get_operator_name(by)
    store = broker._store  # noqa: SLF001 - the same package
    config = await _get_partitioned_config(broker, every)
    converted = False
    if convert:
        # A concurrent index build must run outside of a transaction.
        autocommit_engine = broker.engine.execution_options(isolation_level="AUTOCOMMIT")
        async with autocommit_engine.connect() as connection:
            converted = await connection.run_sync(convert_archive, config)
        if converted:
            arguments = {"every": config.archive_partitions}
            async with broker.engine.begin() as connection:
                await connection.run_sync(
                    record_action, store.dialect, "convert_archive", operator, arguments
                )
    added: list[str] = []

    def add(connection: Connection) -> str | None:
        """Add the next missing partition and an entry in the audit; None if none is missing."""
        return add_partition(connection, store.dialect, config, operator)

    while True:
        async with broker.engine.begin() as connection:
            name = await connection.run_sync(add)
        if name is None:
            return converted, added
        added.append(name)
