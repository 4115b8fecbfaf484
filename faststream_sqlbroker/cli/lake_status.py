"""`sqlbroker archive status`: what an export holds, and how far it is behind."""

from typing import Annotated

import typer
from rich.table import Table

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.archive import duration, print_parts, reach
from faststream_sqlbroker.cli.options import Master, Primary, SafetyLag, Source
from faststream_sqlbroker.cli.session import database_errors, quiet_session
from faststream_sqlbroker.cli.shown import AsJson, age, print_json, row_of
from faststream_sqlbroker.exceptions import SetupError


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
