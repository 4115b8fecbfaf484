"""`sqlbroker archive`: export the archive to a Delta table, prune it, and erase messages."""

from datetime import datetime
from enum import Enum
from typing import Annotated

import typer

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.cli.output import (
    Yes,
    confirm_or_abort,
    print_json,
    print_line,
    print_result,
    print_table,
    refuse_json,
    show_progress,
    to_json_dict,
)
from faststream_sqlbroker.cli.session import LakeOptions, SparkOptions, check_folder_exists
from faststream_sqlbroker.cli.shared_options import (
    ArchiveTable,
    Primary,
    Queues,
    SafetyLag,
    Schema,
    Since,
    Source,
    Until,
    Url,
)
from faststream_sqlbroker.core.text import pluralize
from faststream_sqlbroker.core.times import parse_duration


class WindowSize(str, Enum):
    """Length of an export window; each window has a separate folder."""

    day = "day"
    hour = "hour"


class VerifyMode(str, Enum):
    """Data of a window that is compared with the database."""

    checksums = "checksums"
    counts = "counts"


def export(
    url: Url,
    path: Annotated[
        str, typer.Option(help="Folder of the export, on any file system that Spark reads.")
    ],
    options: SparkOptions,
    since: Since = None,
    until: Until = None,
    window: Annotated[
        WindowSize, typer.Option(help="Length of an export window.")
    ] = WindowSize.day,
    table: ArchiveTable = "message_archive",
    schema: Schema = None,
    queue: Queues = None,
    safety_lag: SafetyLag = "5m",
    recheck: Annotated[
        str, typer.Option(help="Compare the windows of this last period again with the lake.")
    ] = "24h",
    primary: Primary = None,
    source: Source = None,
    record_as: Annotated[
        str | None,
        typer.Option(
            help="Name of the lake; records its windows in the database, for retention with "
            "unless_loaded_by."
        ),
    ] = None,
    message_table: Annotated[
        str, typer.Option(help="Name of the message table, for --record-as.")
    ] = "message",
    verify: Annotated[
        VerifyMode, typer.Option(help="Data of a window to compare with the database.")
    ] = VerifyMode.checksums,
    rows_per_commit: Annotated[
        int, typer.Option(help="Commit after this many rows, in whole windows.")
    ] = 1_000_000,
) -> None:
    """Export the closed windows that are missing, and compare each with the database.

    The exit code is 1 if a file of the export was altered.
    """
    with convert_database_errors(), show_progress("export") as update_progress:
        result = spark.export_archive(
            options.start_driver_session(url),
            url,
            path,
            window=window.value,
            since=since,
            until=until,
            table=table,
            schema=schema,
            queues=queue or None,
            safety_lag=parse_duration(safety_lag, name="--safety-lag"),
            recheck=parse_duration(recheck, name="--recheck"),
            primary=primary,
            source=source,
            verify=verify.value,
            rows_per_commit=rows_per_commit,
            record_as=record_as,
            message_table=message_table,
            on_window=lambda exported_window: update_progress(
                description=f"export {exported_window.name}",
                completed=exported_window.number,
                total=exported_window.total,
            ),
        )
    if options.as_json:
        print_json(to_json_dict(result))
    else:
        _print_export(result)
    raise typer.Exit(1 if result.damaged else 0)


def _print_export(result: "spark.ExportResult") -> None:
    """Print the checked windows, the watermark, and files that were altered, with the remedy."""
    rows = [(window.name, window.action, f"{window.rows:,}") for window in result.windows]
    print_table(result.path, ["window", "action", "rows"], rows)
    print_line(f"{pluralize(result.rows, 'rows')} written")
    print_line(f"windows are closed up to {result.horizon}; {format_watermark(result.watermark)}")
    for name, problem in result.damaged.items():
        print_line(f"{name}: {problem}. Run sqlbroker archive repair to export its windows again")


def prune(
    url: Url,
    options: SparkOptions,
    exported: Annotated[
        str | None, typer.Option(help="Remove only rows that this export contains.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help='Remove only rows older than this, such as "30d" or "12h".')
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing; show what would be removed.")
    ] = False,
    table: Annotated[
        str | None,
        typer.Option(help="Name of the archive table; default: the table of the export."),
    ] = None,
    schema: Schema = None,
    queue: Queues = None,
    source: Source = None,
) -> None:
    """Remove archive rows that an export contains, that are old, or both.

    The exit code is 1 if a window was refused because the export does not contain all its rows.
    """
    check_folder_exists(exported)
    with convert_database_errors(), show_progress("prune") as update_progress:
        result = spark.prune_archive(
            url,
            exported=exported,
            older_than=None
            if older_than is None
            else parse_duration(older_than, name="--older-than"),
            spark=None if exported is None else options.start_driver_session(url),
            table=table,
            schema=schema,
            queues=queue or None,
            source=source,
            dry_run=dry_run,
            on_window=lambda window: update_progress(description=f"prune {window.name}", advance=1),
        )
    refused_windows = [window for window in result.windows if window.refused is not None]
    if options.as_json:
        print_json({"rows": result.rows, **to_json_dict(result)})
    else:
        _print_prune(result, exported, len(refused_windows))
    raise typer.Exit(1 if refused_windows else 0)


def _print_prune(result: "spark.PruneResult", exported: str | None, refused_count: int) -> None:
    """Print pruned and refused windows, dropped partitions, and the number of removed rows."""
    verb = "would be removed" if result.dry_run else "removed"
    if result.windows:
        rows = [
            (
                window.name,
                f"{window.rows:,}",
                f"refused: {window.refused}" if window.refused else verb,
            )
            for window in result.windows
        ]
        print_table(exported or "", ["window", "rows", ""], rows, full_text=True)
    for name in result.partitions:
        print_line(f"partition {name} {verb}")
    refused = f"{pluralize(refused_count, 'windows')} refused"
    print_line(f"{pluralize(result.rows, 'rows')} {verb}; {refused}")


def format_watermark(watermark: datetime | None) -> str:
    """Format the time up to which an export has every window."""
    if watermark is None:
        return "the export has no windows"
    return f"the export is complete up to {watermark}"


def erase(
    url: Url,
    options: LakeOptions,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", "--key", help="Messages with this key; repeat for several."),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option("--ids", "--id", help="Message with this id; repeat for several."),
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="Path of the export; default: only the tables.")
    ] = None,
    keep: Annotated[
        str, typer.Option(help="Time to keep replaced files of the export, in whole hours.")
    ] = "0h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing; show what would be removed.")
    ] = False,
    yes: Yes = False,
    by: Annotated[str, typer.Option(help="Who requested it, for the audit.")] = "",
    message_table: Annotated[str, typer.Option(help="Name of the message table.")] = "message",
    table: ArchiveTable = "message_archive",
    schema: Annotated[str | None, typer.Option(help="Schema of the tables.")] = None,
    source: Source = None,
) -> None:
    """Erase messages by key or id from the live table, the archive and an export.

    The command shows a preview and asks for confirmation. Copies published by replays are erased
    with their message. A message that a subscriber has leased is kept, and the exit code is 1: run
    the command again with its id. Earlier versions of the export are removed as well.
    """
    if not (yes or dry_run):
        refuse_json(options.as_json)
    check_folder_exists(path)
    with convert_database_errors():
        session = None if path is None else options.start_session()

        def run_erase(*, dry_run: bool) -> "spark.EraseResult":
            """Erase the messages, or only count them for the preview."""
            return spark.erase_messages(
                session,
                url,
                path,
                ids=ids or (),
                keys=keys or (),
                dry_run=dry_run,
                keep=parse_duration(keep, name="--keep"),
                by=by,
                message_table=message_table,
                table=table,
                schema=schema,
                source=source,
            )

        # With --yes nothing is shown before, so that the tables and the lake are read only once.
        preview = None if yes and not dry_run else run_erase(dry_run=True)
    if preview is not None:
        _print_erase(preview, options)
        if dry_run:
            raise typer.Exit(1 if preview.leased else 0)
        confirm_or_abort("", as_json=options.as_json)
    with convert_database_errors():
        result = run_erase(dry_run=False)
    _print_erase(result, options)
    raise typer.Exit(1 if result.leased else 0)


def _print_erase(result: "spark.EraseResult", options: LakeOptions) -> None:
    """Print the counts of an erasure or of a dry run, and the messages that were leased."""
    verb = "would be erased" if result.dry_run else "were erased"
    counts = f"{pluralize(result.live, 'live rows')}, {pluralize(result.archived, 'archive rows')}"
    summary = f"{pluralize(result.files, 'files')} removed; audit record {result.audit}"
    print_result(
        to_json_dict(result),
        f"{counts} and {pluralize(result.lake, 'export rows')} {verb}",
        *(
            f"message {message_id} is leased and is not erased: erase it with --ids "
            f"{message_id} when it has ended"
            for message_id in result.leased
        ),
        *([] if result.dry_run else [summary]),
        as_json=options.as_json,
    )
