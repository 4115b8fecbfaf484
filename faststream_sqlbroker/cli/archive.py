"""`sqlbroker archive …`: the archive exported to Parquet, compacted, pruned."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from fractions import Fraction
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from faststream_sqlbroker import spark
from faststream_sqlbroker.cli.console import PlainConsole
from faststream_sqlbroker.cli.options import (
    ArchiveTable,
    Jars,
    Master,
    Queues,
    Schema,
    Since,
    Source,
    To,
    Url,
)
from faststream_sqlbroker.cli.session import database_errors, quiet_session
from faststream_sqlbroker.core.times import parse_duration

app = typer.Typer(no_args_is_help=True, help="The archive: export to Parquet, compaction, pruning.")


class WindowSize(str, Enum):
    """What a folder of the export holds."""

    day = "day"
    hour = "hour"


class Verification(str, Enum):
    """What is compared."""

    checksums = "checksums"
    counts = "counts"


@app.callback()
def commands() -> None:
    """The archive: export to Parquet, compaction, pruning."""


@app.command()
def export(
    url: Url,
    path: Annotated[
        str, typer.Option(help="Where the export is, in any file system that Spark knows.")
    ],
    since: Since = None,
    to: To = None,
    window: Annotated[WindowSize, typer.Option(help="What a folder holds.")] = WindowSize.day,
    table: ArchiveTable = "message_archive",
    schema: Schema = None,
    queue: Queues = None,
    safety_lag: Annotated[
        str, typer.Option(help="How long a transaction may stay open unseen.")
    ] = "5m",
    recheck: Annotated[str, typer.Option(help="How far back windows are compared again.")] = "24h",
    primary: Annotated[
        str | None,
        typer.Option(
            envvar="SQLBROKER_PRIMARY_URL", show_default=False, help="The primary, of a standby."
        ),
    ] = None,
    source: Source = None,
    verify: Annotated[
        Verification, typer.Option(help="What is compared.")
    ] = Verification.checksums,
    master: Master = None,
    jar: Jars = None,
) -> None:
    """Write the closed windows that the export does not have to Parquet, each compared with the
    database.
    """
    with database_errors(), _progress("export") as progress:
        result = spark.export_archive(
            quiet_session(master, jar, url),
            url,
            path,
            window=window.value,
            since=since,
            until=to,
            table=table,
            schema=schema,
            queues=queue or None,
            safety_lag=_duration("--safety-lag", safety_lag),
            recheck=_duration("--recheck", recheck),
            primary=primary,
            source=source,
            verify=verify.value,
            on_window=lambda one: progress(one.name, one.number, one.total),
        )
    listed = [one for one in result.windows if one.rows or one.action != "exported"]
    table_ = Table("window", "", "rows", "files", "bytes", title=result.path)
    for one in listed:
        table_.add_row(one.name, one.action, f"{one.rows:,}", str(one.files), f"{one.bytes:,}")
    _print(
        table_,
        f"{result.rows:,} rows written; {len(result.windows) - len(listed)} windows had no rows",
        f"closed up to {result.horizon}; in the export {_reach(result.watermark)}",
    )


@app.command()
def compact(
    path: Annotated[str, typer.Option(help="Of the export.")],
    since: Since = None,
    to: To = None,
    master: Master = None,
) -> None:
    """Make the small files of an export few; the rows are compared before they replace the old
    ones.
    """
    with database_errors(), _progress("compact") as progress:
        done = spark.compact_export(
            quiet_session(master),
            path,
            since=since,
            until=to,
            on_window=lambda one: progress(one.name, None, None),
        )
    table = Table("window", "rows", "files before", "files", title=path)
    for one in done:
        table.add_row(one.name, f"{one.rows:,}", str(one.files_before), str(one.files))
    _print(table, f"{len(done)} windows were written again")


@app.command()
def prune(
    url: Url,
    exported: Annotated[str | None, typer.Option(help="Only what this export holds.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help='Only what is older, like "30d" or "12h".')
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing, tell what would be.")
    ] = False,
    table: Annotated[
        str | None, typer.Option(help="The archive table, if the export does not say.")
    ] = None,
    schema: Schema = None,
    queue: Queues = None,
    source: Source = None,
    master: Master = None,
    jar: Jars = None,
) -> None:
    """Remove what an export holds, what is old, or what is both, from the database.

    The exit code is 1 if a window was refused.
    """
    # The branches only choose what is printed.
    with database_errors(), _progress("prune") as progress:
        result = spark.prune_archive(
            url,
            exported=exported,
            older_than=None if older_than is None else _duration("--older-than", older_than),
            spark=None if exported is None else quiet_session(master, jar, url),
            table=table,
            schema=schema,
            queues=queue or None,
            source=source,
            dry_run=dry_run,
            on_window=lambda one: progress(one.name, None, None),
        )
    refused = [one for one in result.windows if one.refused is not None]
    would = "would be removed" if dry_run else "removed"
    if result.windows:
        table_ = Table("window", "rows", "", title=exported)
        for one in result.windows:
            table_.add_row(
                one.name, f"{one.rows:,}", f"refused: {one.refused}" if one.refused else would
            )
        _print(table_)
    for name in result.partitions:
        _print(f"partition {name} {would}")
    _print(f"{result.rows:,} rows {would}; {len(refused)} windows were refused")
    raise typer.Exit(1 if refused else 0)


@app.command()
def status(
    path: Annotated[str, typer.Argument(help="Of the export.")], master: Master = None
) -> None:
    """Tell what an export holds, and how far it has come."""
    with database_errors():
        found = spark.describe_export(quiet_session(master), path)
    table = Table("window", "rows", "files", "bytes", title=found.path)
    for one in found.windows:
        if one.rows:
            table.add_row(one.name, f"{one.rows:,}", str(one.files), f"{one.bytes:,}")
    source = ", ".join(
        f"{name} {value}" for name, value in found.source.items() if value is not None
    )
    _print(table, f"of {source}", f"{_reach(found.watermark)}; {found.rows:,} rows")
    if found.pending is not None:
        _print(
            f"window {found.pending} is being replaced, or was when a process died: the next "
            "export ends it"
        )


def _reach(watermark: datetime | None) -> str:
    return "there is no window yet" if watermark is None else f"without a gap up to {watermark}"


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """A bar on stderr; a function that moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = PlainConsole(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        moved = 0

        def move(name: str, number: int | None, total: int | None) -> None:
            nonlocal moved
            moved = number or moved + 1
            bar.update(task, description=f"{title} {name}", completed=moved, total=total)

        yield move


def _duration(name: str, text: str) -> float:
    """Seconds of a duration; in addition to the library's forms it may begin with days: "1d12h"."""
    days, rest = match.groups() if (match := re.fullmatch(r"(\d{1,7})d(.*)", text)) else ("0", text)
    return float(Fraction(days) * 86_400) + (
        parse_duration(rest, name=name) if rest or not match else 0.0
    )


def _print(*parts: Any) -> None:
    console = PlainConsole()
    for part in parts:
        console.print(part)
