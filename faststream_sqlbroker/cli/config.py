"""`sqlbroker config`: check YAML files that describe a service."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from faststream_sqlbroker.cli.output import AsJson, PlainConsole, print_json
from faststream_sqlbroker.exceptions import ConfigError


def check(
    file: Annotated[Path, typer.Argument(help="Path of the YAML file.")], as_json: AsJson = False
) -> None:
    """Find mistakes in a file without connecting to the database; handlers are imported.

    The exit code is 1 if the file has mistakes, and 2 if it cannot be read or an extra is not
    installed.
    """
    from faststream_sqlbroker.config import check_service  # noqa: PLC0415 - an extra

    mistakes: tuple[Any, ...] = ()
    try:
        check_service(file)
    except ConfigError as error:
        mistakes = error.mistakes
    # One unfolded line per mistake, in the format of compilers, for editors.
    lines = [
        f"{file}:{m.line}:{m.column}: {f'{m.where}: ' if m.where else ''}{m.text}" for m in mistakes
    ]
    if as_json:
        print_json([asdict(mistake) for mistake in mistakes])
    for line in () if as_json else lines or [f"{file}: no mistakes"]:
        PlainConsole().print(line, soft_wrap=True)
    if mistakes:
        raise typer.Exit(1)


def schema() -> None:
    """Print the JSON Schema of these files, for editors."""
    from faststream_sqlbroker.config import json_schema  # noqa: PLC0415 - an extra

    print_json(json_schema())
