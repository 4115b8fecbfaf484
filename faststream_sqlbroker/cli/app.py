"""The commands, put together."""

import typer

from faststream_sqlbroker.cli.archive import app as archive
from faststream_sqlbroker.cli.replay import replay
from faststream_sqlbroker.cli.report import report
from faststream_sqlbroker.cli.spark import app as spark

archive.command()(replay)
archive.command()(report)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a local may be the database's URL, with its password
    help="Work with the tables of faststream_sqlbroker outside of an application.",
)
app.add_typer(archive, name="archive")
app.add_typer(spark, name="spark")
