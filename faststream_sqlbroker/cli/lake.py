"""`sqlbroker archive status`, `verify` and `repair`: show and check an export."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.archive_commands import format_watermark
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.cli.output import (
    print_json,
    print_line,
    print_result,
    print_table,
    to_json_dict,
)
from faststream_sqlbroker.cli.session import LakeOptions, SparkOptions, check_folder_exists
from faststream_sqlbroker.cli.shared_options import (
    Primary,
    SafetyLag,
    Since,
    Source,
    Url,
    UrlIfNeeded,
)
from faststream_sqlbroker.core.text import pluralize
from faststream_sqlbroker.core.times import format_duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

Lake = Annotated[str, typer.Argument(help="Path of the export.")]
Ended = Annotated[
    str | None, typer.Option(help="Only windows that ended by this time, such as 2026-03-01.")
]


def verify(
    path: Lake,
    options: LakeOptions,
    since: Since = None,
    until: Ended = None,
    database: Annotated[
        bool, typer.Option("--database", help="Search the database for rows that the export lacks.")
    ] = False,
    url: UrlIfNeeded = None,
    source: Source = None,
) -> None:
    """Read the files of an export and compare them with its records.

    The exit code is 1 if they differ, or if the export lacks rows of its windows.
    """
    if database and url is None:
        raise SetupError("--database reads the database: give --url or SQLBROKER_URL")
    check_folder_exists(path)
    with convert_database_errors():
        result = spark.verify_export(
            options.start_session(),
            path,
            url=url if database else None,
            source=source,
            since=since,
            until=until,
        )
    uncovered_note = "rows of the database are between the export's windows or before the first"
    units = ("files", "windows", "rows")
    files, windows, rows = (pluralize(getattr(result, unit), unit) for unit in units)
    print_result(
        {**to_json_dict(result), "intact": result.intact},
        *_format_issues("file", result.damaged),
        *_format_issues("window", result.differing),
        *_format_issues("window", result.missing),
        *([f"{result.uncovered:,} {uncovered_note}"] if result.uncovered else []),
        f"{files}, {windows} and {rows} compared: {_format_verification(result)}",
        as_json=options.as_json,
    )
    raise typer.Exit(0 if result.intact else 1)


def _format_verification(result: "spark.VerifyResult") -> str:
    """Summarize a verification in a line.

    `repair` mends damaged files and differing windows. Windows that lack rows of the database are
    intact otherwise; an export with a `--since` before them adds the rows.
    """
    if result.intact:
        return "no differences"
    lacking = f"{pluralize(len(result.missing), 'incomplete windows')}: the database has more rows"
    if not (result.damaged or result.differing):
        return lacking
    return (
        f"{pluralize(len(result.damaged), 'damaged files')}, "
        f"{pluralize(len(result.differing), 'differing windows')}: run sqlbroker archive repair to "
        "export them again, if the database still has their rows"
        f"{f'; {lacking}' if result.missing else ''}"
    )


def repair(url: Url, path: Lake, options: SparkOptions, source: Source = None) -> None:
    """Export damaged windows again, if the database still has their rows.

    The exit code is 1 if a window stays damaged.
    """
    check_folder_exists(path)
    with convert_database_errors():
        result = spark.repair_export(options.start_driver_session(url), url, path, source=source)
    repaired = f"{pluralize(len(result.windows), 'windows')} repaired"
    files = f"{pluralize(len(result.files), 'files')} removed from the table"
    print_result(
        to_json_dict(result),
        *(f"window {name}: repaired, {pluralize(n, 'rows')}" for name, n in result.windows.items()),
        *_format_issues("window", result.unrepaired),
        f"{repaired}, {len(result.unrepaired)} still damaged; {files}",
        as_json=options.as_json,
    )
    raise typer.Exit(1 if result.unrepaired else 0)


def _format_issues(label: str, issues: Mapping[str, Any]) -> list[str]:
    """Return a line for each file or window with an issue."""
    return [f"{label} {name}: {issue}" for name, issue in issues.items()]


def status(
    path: Annotated[str, typer.Argument(help="Folder of the export.")],
    options: LakeOptions,
    freshness: Annotated[
        bool, typer.Option("--freshness", help="Show how far the export lags behind the database.")
    ] = False,
    url: UrlIfNeeded = None,
    cap: Annotated[
        int, typer.Option(help="With --freshness: count at most this many rows.")
    ] = 1_000_000,
    safety_lag: SafetyLag = "5m",
    primary: Primary = None,
    source: Source = None,
) -> None:
    """Show the windows and the watermark of an export; with --freshness, also its lag."""
    if freshness and url is None:
        raise SetupError("--freshness reads the database: give --url or SQLBROKER_URL")
    check_folder_exists(path)
    lag = None
    with convert_database_errors():
        session = options.start_session()
        export_status = spark.describe_export(session, path)
        if freshness and url is not None:
            lag = spark.measure_freshness(
                session,
                url,
                path,
                cap=cap,
                safety_lag=parse_duration(safety_lag, name="--safety-lag"),
                primary=primary,
                source=source,
            )
    if options.as_json:
        lag_fields = {} if lag is None else {"freshness": to_json_dict(lag)}
        print_json({"rows": export_status.rows, **to_json_dict(export_status), **lag_fields})
        return
    _print_status(export_status)
    if lag is not None:
        _print_freshness(lag)


def _print_status(export_status: "spark.ExportStatus") -> None:
    """Print the windows, the source, the watermark and the size of an export."""
    rows = [(window.name, f"{window.rows:,}") for window in export_status.windows]
    print_table(export_status.path, ["window", "rows"], rows)
    source = ", ".join(
        f"{name} {value}" for name, value in export_status.source.items() if value is not None
    )
    print_line(f"source: {source}")
    size = pluralize(export_status.rows, "rows")
    print_line(f"{format_watermark(export_status.watermark)}; {size}")
    print_line(
        f"{pluralize(export_status.files, 'files')}, {export_status.bytes:,} bytes; "
        f"table version {export_status.version}"
    )


def _print_freshness(lag: "spark.Freshness") -> None:
    """Print the lag of an export: the age of its watermark, and rows that it would add now."""
    age_note = (
        ""
        if lag.watermark_age is None
        else f"; the watermark is {format_duration(lag.watermark_age)} old"
    )
    rows = f"{'more than ' if lag.capped else ''}{pluralize(lag.rows_behind, 'rows')}"
    print_line(f"windows are closed up to {lag.horizon}{age_note}")
    print_line(f"not in the export: {rows} of closed windows")
