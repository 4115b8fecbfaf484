"""`sqlbroker config`: files of YAML that describe a service."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from faststream_sqlbroker.cli.output import AsJson, print_json, print_line
from faststream_sqlbroker.exceptions import ConfigError

config = typer.Typer(no_args_is_help=True, help="Check files that describe a service.")


@config.command()
def check(
    file: Annotated[Path, typer.Argument(help="The file of YAML.")], as_json: AsJson = False
) -> None:
    """Find the mistakes of a file, without the database; handlers are imported.

    Exit code 0: there are none; 1: there are some; 2: the file cannot be read, or an extra is not
    installed.
    """
    from faststream_sqlbroker.config import check_service  # noqa: PLC0415 - an extra

    found: tuple[Any, ...] = ()
    try:
        check_service(file)
    except ConfigError as error:
        found = error.mistakes
    if as_json:
        print_json([asdict(mistake) for mistake in found])
    else:
        for mistake in found:
            where = f"{mistake.where}: " if mistake.where else ""
            # As compilers write it: editors jump there.
            print_line(f"{file}:{mistake.line}:{mistake.column}: {where}{mistake.text}")
        if not found:
            print_line(f"{file}: no mistakes")
    if found:
        raise typer.Exit(1)


@config.command()
def schema() -> None:
    """Print the JSON Schema of such a file, for editors."""
    from faststream_sqlbroker.config import json_schema  # noqa: PLC0415 - an extra

    print_json(json_schema())
