"""`sqlbroker partitions`: the archive's partitions, on PostgreSQL."""

from dataclasses import replace
from typing import Annotated

import typer
from sqlalchemy import Connection

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin.arguments import operator_name
from faststream_sqlbroker.cli.groups import By
from faststream_sqlbroker.cli.shown import AsJson, Yes, ask, print_json, print_line
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.database.partitions import add_noted
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.schema.partitions import (
    convert_archive,
    need_postgresql,
)


def partitions(
    context: typer.Context,
    every: Annotated[
        str | None,
        typer.Option(help="day, week or month; default that of --app."),
    ] = None,
    convert: Annotated[
        bool, typer.Option("--convert", help="Turn an archive without partitions into one.")
    ] = False,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Add the partitions of the archive that are missing; PostgreSQL, as its owner.

    --convert builds a unique index first, which takes as long as reading the archive; messages are
    archived during it.
    """
    if convert and not yes:
        ask("partitions: the archive will be converted", as_json=as_json)
    converted, added = run(context, lambda broker: _work(broker, every, by, convert=convert))
    if as_json:
        print_json({"converted": converted, "added": added})
        return
    if converted:
        print_line("the archive has partitions now")
    print_line(f"{len(added)} partitions added" + "".join(f"\n{name}" for name in added))


async def _work(
    broker: SqlBroker, every: str | None, by: str | None, *, convert: bool
) -> tuple[bool, list[str]]:
    who = operator_name(by)
    store = broker._store  # noqa: SLF001 - the same package
    config = store.tables.config
    if every is not None:
        config = replace(config, archive_partitions=every)
    need_postgresql(broker.engine.dialect.name, config)
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
