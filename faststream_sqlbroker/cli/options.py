"""Options that several commands take, declared once."""

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[
    str,
    typer.Option(
        envvar="SQLBROKER_URL",
        show_default=False,
        help=(
            "SQLAlchemy URL of the database. Give it by the variable to keep its password out of "
            "the list of processes."
        ),
    ),
]
Master = Annotated[
    str | None,
    typer.Option(help="Spark's master. Default: spark.master as set elsewhere, else local[*]."),
]
Jars = Annotated[
    list[Path] | None,
    typer.Option("--jar", help="A JDBC driver's jar, preferred to those that are found."),
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", help="Only this queue; repeat the option for several."),
]
Since = Annotated[
    str | None, typer.Option(help="Only rows archived at or after this moment, like 2026-03-01.")
]
Until = Annotated[
    str | None,
    typer.Option(help="Only rows archived before this moment, like 2026-03-01T12:00+00:00."),
]
ArchiveTable = Annotated[str, typer.Option(help="Name of the archive table.")]
Source = Annotated[
    str | None,
    typer.Option(help="Name of the database in the export, if it has several addresses."),
]
Schema = Annotated[
    str | None, typer.Option(help="Schema of the table; on MySQL and MariaDB its database.")
]
SafetyLag = Annotated[
    str,
    typer.Option(help="How long a transaction may last if the database does not show open ones."),
]
Primary = Annotated[
    str | None,
    typer.Option(
        envvar="SQLBROKER_PRIMARY_URL",
        show_default=False,
        help="URL of the primary, if --url is a standby.",
    ),
]
