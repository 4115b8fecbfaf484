"""The command `sqlbroker`: `pip install "sqlbroker[cli]"`."""

import os
import sys
from contextlib import redirect_stderr, suppress
from io import StringIO
from itertools import takewhile
from typing import NoReturn

from faststream_sqlbroker.core.distribution import shared_files_warning

COMPLETING = "_SQLBROKER_COMPLETE"
"""The variable by which a shell asks for completions."""


def main() -> None:
    """Run the command line; errors of this package are one line on stderr and exit code 2. With
    `--json` they, and errors of usage, are a line of JSON.
    """
    if COMPLETING in os.environ:
        _complete()
    if warning := shared_files_warning():
        sys.stderr.write(f"warning: {warning}\n")
    try:
        import typer  # noqa: PLC0415 - an extra

        from faststream_sqlbroker.cli.app import app  # noqa: PLC0415 - Typer is an extra
    except ModuleNotFoundError as error:
        if str(error.name).startswith("faststream_sqlbroker"):
            raise
        sys.exit(f"{error.name!r} is not installed: pip install 'sqlbroker[cli]'")
    as_json = "--json" in takewhile("--".__ne__, sys.argv)
    try:
        # By itself it would print errors of usage, and exit.
        sys.exit(app(standalone_mode=not as_json))
    except typer.Abort:
        sys.exit("Aborted!")
    except Exception as error:
        # Not before: its base classes import FastStream, which `--help` does without.
        from faststream_sqlbroker.exceptions import SqlBrokerError  # noqa: PLC0415

        # Click's errors of usage, of which Typer may have its own classes.
        if not isinstance(error, SqlBrokerError) and not hasattr(error, "format_message"):
            raise
        if as_json:
            from faststream_sqlbroker.cli.output import print_error  # noqa: PLC0415 - as above

            print_error(getattr(error, "format_message", error.__str__)(), type(error).__name__, 2)
        else:
            sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _complete() -> NoReturn:
    """Answer the shell. Whatever fails, it gets no traceback, and no process that goes on."""
    code: object = 0
    with redirect_stderr(StringIO()), suppress(Exception):
        from faststream_sqlbroker.cli.app import app  # noqa: PLC0415 - Typer is an extra

        try:
            app()
        except SystemExit as end:
            code = end.code
    sys.stdout.flush()
    # Not by sys.exit: a look that takes too long may have threads that it would wait for.
    os._exit(code if isinstance(code, int) else 0)
