"""`sqlbroker archive erase`: the messages of a person, out of the tables and a lake."""

from typing import Annotated

import typer

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.options import ArchiveTable, Master, Source, Url
from faststream_sqlbroker.cli.session import database_errors, quiet_session
from faststream_sqlbroker.cli.shown import AsJson, Yes, ask, print_json, print_line, row_of
from faststream_sqlbroker.core.times import parse_duration


def erase(
    url: Url,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", "--key", help="Messages with this key; repeat it for several."),
    ] = None,
    ids: Annotated[
        list[int] | None,
        typer.Option("--ids", "--id", help="The message with this id; repeat it for several."),
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="Path of the export; without it, the tables only.")
    ] = None,
    keep: Annotated[
        str, typer.Option(help="How long replaced files of the export stay, in whole hours.")
    ] = "0h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing; show what would be removed.")
    ] = False,
    yes: Yes = False,
    by: Annotated[str, typer.Option(help="Who asked for it, for the audit.")] = "",
    message_table: Annotated[str, typer.Option(help="Name of the message table.")] = "message",
    table: ArchiveTable = "message_archive",
    schema: Annotated[str | None, typer.Option(help="Schema of the tables.")] = None,
    source: Source = None,
    as_json: AsJson = False,
    master: Master = None,
) -> None:
    """Erase messages by key or id from the live table, the archive and an export.

    It shows what it would erase, then asks. A message that a subscriber has leased stays: the exit
    code is 1, and the command is to be run again. Earlier versions of the export go, too.
    """
    with database_errors():
        session = None if path is None else quiet_session(master)

        def run(*, dry_run: bool) -> "spark.EraseResult":
            return spark.erase_messages(
                session,
                url,
                path,
                ids=ids or (),
                keys=keys or (),
                dry_run=dry_run,
                keep=0 if keep in ("0", "0h") else parse_duration(keep, name="--keep"),
                by=by,
                message_table=message_table,
                table=table,
                schema=schema,
                source=source,
            )

        found = None if yes and not dry_run else run(dry_run=True)
    if found is not None:
        if not as_json or dry_run:
            _show(found, as_json=as_json)
        if dry_run:
            raise typer.Exit(1 if found.leased else 0)
        ask("", as_json=as_json)
    with database_errors():
        done = run(dry_run=False)
    _show(done, as_json=as_json)
    raise typer.Exit(1 if done.leased else 0)


def _show(result: "spark.EraseResult", *, as_json: bool) -> None:
    if as_json:
        print_json(row_of(result))
        return
    what = "would be erased" if result.dry_run else "were erased"
    print_line(
        f"{result.live:,} live rows, {result.archived:,} of the archive and {result.lake:,} of the "
        f"export {what}"
    )
    for one in result.leased:
        print_line(f"message {one} is leased and stays: run it again when it has ended")
    if not result.dry_run:
        print_line(f"{result.files:,} files were removed; audit record {result.audit}")
