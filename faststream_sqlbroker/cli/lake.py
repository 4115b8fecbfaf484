"""`sqlbroker archive status`, `verify` and `repair`: what an export holds, how far it is behind,
and whether it is as it was committed.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.archive import duration, print_parts, reach
from faststream_sqlbroker.cli.errors import database_errors
from faststream_sqlbroker.cli.options import Jars, Master, Primary, SafetyLag, Since, Source, Url
from faststream_sqlbroker.cli.output import AsJson, age, print_json, print_line, row_of
from faststream_sqlbroker.cli.session import quiet_session
from faststream_sqlbroker.exceptions import SetupError

Lake = Annotated[str, typer.Argument(help="Path of the export.")]
Ended = Annotated[
    str | None, typer.Option(help="Only windows that have ended by this moment, like 2026-03-01.")
]


def verify(
    path: Lake,
    since: Since = None,
    until: Ended = None,
    as_json: AsJson = False,
    master: Master = None,
) -> None:
    """Read the files of an export again and compare them with its log.

    The exit code is 1 if something differs.
    """
    with database_errors():
        found = spark.verify_export(quiet_session(master), path, since=since, until=until)
    if as_json:
        print_json({**row_of(found), "intact": found.intact})
    else:
        _print_problems("file", found.damaged)
        _print_problems("file", dict.fromkeys(found.unrecorded, "its SHA-256 is not in the log"))
        _print_problems("window", found.differing)
        print_line(
            f"{found.files:,} files, {found.windows:,} windows and {found.rows:,} rows were "
            f"compared: {_verdict(found)}"
        )
    raise typer.Exit(0 if found.intact else 1)


def _verdict(found: "spark.VerifyResult") -> str:
    if found.intact:
        return "all are as they were committed"
    return (
        f"{len(found.damaged)} files are damaged, {len(found.unrecorded)} are not recorded, "
        f"{len(found.differing)} windows differ: sqlbroker archive repair exports them again, if "
        "the database has their rows"
    )


def repair(
    url: Url,
    path: Lake,
    source: Source = None,
    as_json: AsJson = False,
    master: Master = None,
    jar: Jars = None,
) -> None:
    """Export damaged windows again, as long as the database has their rows.

    The exit code is 1 if a window stays damaged.
    """
    with database_errors():
        done = spark.repair_export(quiet_session(master, jar, url), url, path, source=source)
    if as_json:
        print_json(row_of(done))
    else:
        for name, rows in done.windows.items():
            print_line(f"window {name}: {rows:,} rows, whole again")
        _print_problems("window", done.left)
        print_line(
            f"{len(done.windows)} windows were repaired, {len(done.left)} stay damaged; "
            f"{len(done.files)} files were taken out, {len(done.recorded)} were recorded"
        )
    raise typer.Exit(1 if done.left else 0)


def _print_problems(what: str, problems: Mapping[str, Any]) -> None:
    for name, problem in problems.items():
        print_line(f"{what} {name}: {problem}")


def status(
    path: Annotated[str, typer.Argument(help="Folder of the export.")],
    freshness: Annotated[
        bool, typer.Option("--freshness", help="Ask the database how far the export is behind.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="SQLBROKER_URL",
            show_default=False,
            help="SQLAlchemy URL of the database, with --freshness.",
        ),
    ] = None,
    cap: Annotated[
        int, typer.Option(help="Count rows up to this number, with --freshness.")
    ] = 1_000_000,
    safety_lag: SafetyLag = "5m",
    primary: Primary = None,
    source: Source = None,
    as_json: AsJson = False,
    master: Master = None,
) -> None:
    """Show what an export holds, and up to when; with --freshness how far it is behind."""
    if freshness and url is None:
        raise SetupError("--freshness asks the database: give --url or SQLBROKER_URL")
    behind = None
    with database_errors():
        session = quiet_session(master)
        found = spark.describe_export(session, path)
        if freshness and url is not None:
            behind = spark.measure_freshness(
                session,
                url,
                path,
                cap=cap,
                safety_lag=duration("--safety-lag", safety_lag),
                primary=primary,
                source=source,
            )
    if as_json:
        more = {} if behind is None else {"freshness": row_of(behind)}
        print_json({"rows": found.rows, **row_of(found), **more})
        return
    _print_status(found)
    if behind is not None:
        _print_freshness(behind)


def _print_status(found: "spark.ExportStatus") -> None:
    table = Table("window", "rows", title=found.path)
    for one in found.windows:
        table.add_row(one.name, f"{one.rows:,}")
    source = ", ".join(
        f"{name} {value}" for name, value in found.source.items() if value is not None
    )
    print_parts(
        table,
        f"of {source}",
        f"{reach(found.watermark)}; {found.rows:,} rows",
        f"{found.files} files of {found.bytes:,} bytes; version {found.version} of the table",
    )


def _print_freshness(behind: "spark.Freshness") -> None:
    old = (
        ""
        if behind.watermark_age is None
        else f"; the watermark is {age(behind.watermark_age)} old"
    )
    rows = f"{'more than ' if behind.capped else ''}{behind.rows_behind:,}"
    print_parts(
        f"closed up to {behind.horizon}{old}",
        f"{rows} rows of closed windows are not in the export",
    )
