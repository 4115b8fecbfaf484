"""Commands for the tables: sql shows the migrations, migrate runs them, partitions adds those of
the archive on PostgreSQL.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from sqlalchemy import Connection, inspect, select

from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.admin.arguments import operator_name
from faststream_sqlbroker.cli.options import Change
from faststream_sqlbroker.cli.output import AsJson, print_json, print_line, refuse_json
from faststream_sqlbroker.cli.target import run, target_of
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.database.retention import add_noted
from faststream_sqlbroker.exceptions import SchemaError, SetupError
from faststream_sqlbroker.schema.functions import render_functions
from faststream_sqlbroker.schema.migrate import HEAD, MIGRATED, render, upgrade, versions
from faststream_sqlbroker.schema.partitions import archive_of, convert_archive, need_postgresql

Since = Annotated[str | None, typer.Option(help="Only what comes after this version; default all.")]


def sql(
    context: typer.Context,
    database: Annotated[
        str | None,
        typer.Option(
            help="postgresql, mysql (MariaDB, too) or sqlite; default that of --app or --url."
        ),
    ] = None,
    since: Since = None,
    to: Annotated[str, typer.Option(help="Up to this version.")] = "head",
    functions: Annotated[
        bool, typer.Option("--functions", help="The SQL functions, not the tables.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the migrations, or the functions, as SQL; nothing is connected to."""
    target = target_of(context)
    if database is None or target.app is not None:
        broker = target.broker()
        config = broker._store.tables.config  # noqa: SLF001 - the same package
        kind = database or broker._store.dialect_name  # noqa: SLF001
    else:
        config = target.tables
        kind = database
    kind = _dialect(kind)
    if functions:
        _print_sql({"functions": True}, render_functions(kind, config), as_json=as_json)
        return
    known = [*versions(), "head"]
    for option, given in (("--since", since), ("--to", to)):
        if given is not None and given not in known:
            raise SetupError(f"{option} must be one of {', '.join(known)}, got {given!r}")
    text = render(kind, config, since=since, to=to)
    last = HEAD if to == "head" else to
    _print_sql({"functions": False, "since": since, "to": last}, text, as_json=as_json)


def _print_sql(what: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**what, "sql": text})
    else:
        typer.echo(text, nl=False)


def migrate(
    context: typer.Context,
    how: Change,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the SQL, and change nothing.")
    ] = False,
) -> None:
    """Bring the tables to the version of this package, creating them if there are none.

    What was done is in the audit.
    """
    if not (how.yes or dry_run):
        refuse_json(how.as_json)
    who = operator_name(how.by)
    version, pending = run(context, _pending)
    done = bool(pending) and not dry_run
    if done:
        if not how.yes:
            print_line(pending)
            typer.confirm(f"Run this, from version {version or 'none'} to {HEAD}?", abort=True)
        run(context, lambda broker: _upgrade(broker, version, who))
    if how.as_json:
        print_json({"from": version, "to": HEAD, "sql": pending, "done": done})
    else:
        typer.echo(_said(version, pending, done=done), nl=False)


def _said(version: str | None, pending: str, *, done: bool) -> str:
    if done:
        return f"the tables have version {HEAD} now; it was {version or 'none'}\n"
    return pending or f"the tables have version {HEAD}, the newest of this package\n"


async def _pending(broker: SqlBroker) -> tuple[str | None, str]:
    """The version that the tables have, and the SQL that is missing; no text if none is."""
    config = broker._store.tables.config  # noqa: SLF001 - the same package
    async with broker.engine.connect() as connection:
        version = await connection.run_sync(_version, broker)
    if version == HEAD:
        return version, ""
    if version is not None and version not in versions():
        raise SchemaError(
            f"the tables have version {version}, which this package, of version {HEAD}, does not "
            "know: it is older than the tables; upgrade the package"
        )
    return version, render(_dialect(broker._store.dialect_name), config, since=version)  # noqa: SLF001


def _version(connection: Connection, broker: SqlBroker) -> str | None:
    tables = broker._store.tables  # noqa: SLF001 - the same package
    looked_at = inspect(connection)
    if looked_at.has_table(tables.version.name, schema=tables.version.schema):
        found = connection.execute(select(tables.version.c.version_num)).scalar()
        if found is not None:
            return str(found)
    if looked_at.has_table(tables.message.name, schema=tables.message.schema):
        # The first migration would fail at the first table, and tell nothing of the reason.
        raise SchemaError(
            f"the table {tables.message.fullname!r} exists, but {tables.version.fullname!r} names "
            "no version: migrations of your application have made it, so let them change it "
            "(docs/howto/alembic.md)"
        )
    return None


async def _upgrade(broker: SqlBroker, version: str | None, by: str) -> None:
    store = broker._store  # noqa: SLF001 - the same package
    given = {"from": version, "to": HEAD}
    async with broker.engine.begin() as connection:
        await connection.run_sync(upgrade, store.tables.config)
        # After it: the table of the audit may be new.
        await connection.run_sync(note_action, store.dialect, "migrate", by, given)


def _dialect(name: str) -> str:
    found = "mysql" if name == "mariadb" else name
    if found not in MIGRATED:
        raise SetupError(
            f"--database must be one of {', '.join(MIGRATED)} or mariadb, got {name!r}"
        )
    return found


def partitions(
    context: typer.Context,
    how: Change,
    every: Annotated[
        str | None,
        typer.Option(help="day, week or month; default that of --app."),
    ] = None,
    convert: Annotated[
        bool, typer.Option("--convert", help="Turn an archive without partitions into one.")
    ] = False,
) -> None:
    """Add the partitions of the archive that are missing; PostgreSQL, as its owner.

    --convert builds a unique index first, which takes as long as reading the archive; messages are
    archived during it.
    """
    if convert and not how.yes:
        run(context, lambda broker: _partitioned(broker, every))
        how.confirm("partitions: the archive will be converted")
    converted, added = run(
        context, lambda broker: _add_partitions(broker, every, how.by, convert=convert)
    )
    first = ["the archive has partitions now"] if converted else []
    told = {"converted": converted, "added": added}
    how.tell(told, *first, f"{len(added)} partitions added", *added)


async def _partitioned(broker: SqlBroker, every: str | None) -> SqlBrokerSchemaConfig:
    """The tables with the partitions that are asked for.

    Raises:
        SetupError: `every` is not valid, or the database has no partitions.
    """
    config = broker._store.tables.config  # noqa: SLF001 - the same package
    if every is not None:
        config = replace(config, archive_partitions=every)
    need_postgresql(broker.engine.dialect.name, config)
    archive_of(config)
    return config


async def _add_partitions(
    broker: SqlBroker, every: str | None, by: str | None, *, convert: bool
) -> tuple[bool, list[str]]:
    who = operator_name(by)
    store = broker._store  # noqa: SLF001 - the same package
    config = await _partitioned(broker, every)
    converted = False
    if convert:
        # An index can only be built concurrently outside of a transaction.
        alone = broker.engine.execution_options(isolation_level="AUTOCOMMIT")
        async with alone.connect() as connection:
            converted = await connection.run_sync(convert_archive, config)
        if converted:
            given = {"every": config.archive_partitions}
            async with broker.engine.begin() as connection:
                await connection.run_sync(note_action, store.dialect, "convert_archive", who, given)
    added: list[str] = []

    def add(connection: Connection) -> str | None:
        return add_noted(connection, store.dialect, config, who)

    while True:
        async with broker.engine.begin() as connection:
            name = await connection.run_sync(add)
        if name is None:
            return converted, added
        added.append(name)
