"""`sqlbroker archive status`, `verify` and `repair`: what an export holds, how far it is behind,
and whether it is as it was committed.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.archive import reach
from faststream_sqlbroker.cli.errors import database_errors
from faststream_sqlbroker.cli.options import Primary, SafetyLag, Since, Source, Url, UrlIfNeeded
from faststream_sqlbroker.cli.output import print_json, print_line, print_table, row_of, tell
from faststream_sqlbroker.cli.session import LakeRun, SparkRun, need_folder
from faststream_sqlbroker.core.times import length_text, parse_duration
from faststream_sqlbroker.exceptions import SetupError

Lake = Annotated[str, typer.Argument(help="Path of the export.")]
Ended = Annotated[
    str | None, typer.Option(help="Only windows that have ended by this moment, like 2026-03-01.")
]


def verify(
    path: Lake,
    how: LakeRun,
    since: Since = None,
    until: Ended = None,
    database: Annotated[
        bool,
        typer.Option("--database", help="Ask the database for rows that the export lacks."),
    ] = False,
    url: UrlIfNeeded = None,
    source: Source = None,
) -> None:
    """Read the files of an export again and compare them with what was recorded.

    The exit code is 1 if something differs, or the export lacks rows of its windows.
    """
    if database and url is None:
        raise SetupError("--database asks the database: give --url or SQLBROKER_URL")
    need_folder(path)
    with database_errors():
        result = spark.verify_export(
            how.session(),
            path,
            url=url if database else None,
            source=source,
            since=since,
            until=until,
        )
    where = "rows of the database lie between its windows or before the first"
    counts = f"{result.files:,} files, {result.windows:,} windows and {result.rows:,} rows"
    tell(
        {**row_of(result), "intact": result.intact},
        *_problems("file", result.damaged),
        *_problems("window", result.differing),
        *_problems("window", result.lacking),
        *([f"{result.uncovered:,} {where}"] if result.uncovered else []),
        f"{counts} were compared: {_verdict(result)}",
        as_json=how.as_json,
    )
    raise typer.Exit(0 if result.intact else 1)


def _verdict(found: "spark.VerifyResult") -> str:
    if found.intact:
        return "all are as they were committed"
    lacking = f"{len(found.lacking)} windows lack rows of the database"
    if not (found.damaged or found.differing):
        return lacking
    return (
        f"{len(found.damaged)} files are damaged, {len(found.differing)} windows differ: sqlbroker "
        "archive repair exports them again, if the database has their rows"
        f"{f'; {lacking}' if found.lacking else ''}"
    )


def repair(
    url: Url,
    path: Lake,
    how: SparkRun,
    source: Source = None,
) -> None:
    """Export damaged windows again, as long as the database has their rows.

    The exit code is 1 if a window stays damaged.
    """
    need_folder(path)
    with database_errors():
        done = spark.repair_export(how.session_of(url), url, path, source=source)
    counts = f"{len(done.windows)} windows were repaired, {len(done.left)} stay damaged"
    files = f"{len(done.files)} files were taken out"
    tell(
        row_of(done),
        *(f"window {name}: {rows:,} rows, whole again" for name, rows in done.windows.items()),
        *_problems("window", done.left),
        f"{counts}; {files}",
        as_json=how.as_json,
    )
    raise typer.Exit(1 if done.left else 0)


def _problems(what: str, problems: Mapping[str, Any]) -> list[str]:
    return [f"{what} {name}: {problem}" for name, problem in problems.items()]


def status(
    path: Annotated[str, typer.Argument(help="Folder of the export.")],
    how: LakeRun,
    freshness: Annotated[
        bool, typer.Option("--freshness", help="Ask the database how far the export is behind.")
    ] = False,
    url: UrlIfNeeded = None,
    cap: Annotated[
        int, typer.Option(help="Count rows up to this number, with --freshness.")
    ] = 1_000_000,
    safety_lag: SafetyLag = "5m",
    primary: Primary = None,
    source: Source = None,
) -> None:
    """Show what an export holds, and up to when; with --freshness how far it is behind."""
    if freshness and url is None:
        raise SetupError("--freshness asks the database: give --url or SQLBROKER_URL")
    need_folder(path)
    behind = None
    with database_errors():
        session = how.session()
        found = spark.describe_export(session, path)
        if freshness and url is not None:
            behind = spark.measure_freshness(
                session,
                url,
                path,
                cap=cap,
                safety_lag=parse_duration(safety_lag, name="--safety-lag"),
                primary=primary,
                source=source,
            )
    if how.as_json:
        more = {} if behind is None else {"freshness": row_of(behind)}
        print_json({"rows": found.rows, **row_of(found), **more})
        return
    _print_status(found)
    if behind is not None:
        _print_freshness(behind)


def _print_status(found: "spark.ExportStatus") -> None:
    rows = [(one.name, f"{one.rows:,}") for one in found.windows]
    print_table(found.path, ["window", "rows"], rows)
    source = ", ".join(
        f"{name} {value}" for name, value in found.source.items() if value is not None
    )
    print_line(f"of {source}")
    print_line(f"{reach(found.watermark)}; {found.rows:,} rows")
    print_line(
        f"{found.files} files of {found.bytes:,} bytes; version {found.version} of the table"
    )


def _print_freshness(behind: "spark.Freshness") -> None:
    old = (
        ""
        if behind.watermark_age is None
        else f"; the watermark is {length_text(behind.watermark_age)} old"
    )
    rows = f"{'more than ' if behind.capped else ''}{behind.rows_behind:,}"
    print_line(f"closed up to {behind.horizon}{old}")
    print_line(f"{rows} rows of closed windows are not in the export")
