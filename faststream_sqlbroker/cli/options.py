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
            "SQLAlchemy URL of the database; the variable keeps a password out of the list of "
            "processes."
        ),
    ),
]
Master = Annotated[str | None, typer.Option(help="Spark's master; local[*] where nothing says.")]
Jars = Annotated[
    list[Path] | None, typer.Option("--jar", help="A JDBC driver's jar to look at first.")
]
Queues = Annotated[
    list[str] | None, typer.Option("--queue", help="Only this queue; may be given again.")
]
Since = Annotated[str | None, typer.Option(help="Archived at or after this moment: 2026-03-01.")]
To = Annotated[
    str | None, typer.Option(help="Archived before this moment: 2026-03-01T12:00+00:00.")
]
ArchiveTable = Annotated[str, typer.Option(help="The archive table.")]
Source = Annotated[
    str | None,
    typer.Option(help="A name for the database in the export, where it has several addresses."),
]
Schema = Annotated[str | None, typer.Option(help="Its schema; MySQL and MariaDB: its database.")]
