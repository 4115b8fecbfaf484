"""`sqlbroker archive verify` and `repair`: whether a lake is as it was committed."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.options import Jars, Master, Since, Source, Url
from faststream_sqlbroker.cli.session import database_errors, quiet_session
from faststream_sqlbroker.cli.shown import AsJson, print_json, print_line, row_of

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
        f"{len(found.differing)} windows differ: sqlbroker archive repair reads them again"
    )


def repair(
    url: Url,
    path: Lake,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Also windows whose rows the database no longer has: what is left counts.",
        ),
    ] = False,
    source: Source = None,
    as_json: AsJson = False,
    master: Master = None,
    jar: Jars = None,
) -> None:
    """Read damaged windows of an export again, from the database and the files that are whole.

    The exit code is 1 if a window stays damaged.
    """
    with database_errors():
        done = spark.repair_export(
            quiet_session(master, jar, url), url, path, source=source, accept_loss=accept_loss
        )
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
