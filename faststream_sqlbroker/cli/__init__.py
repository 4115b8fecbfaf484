"""The command `sqlbroker`: `pip install "sqlbroker[cli]"`."""

import os
import sys
from contextlib import redirect_stderr, suppress
from io import StringIO
from typing import NoReturn

from faststream_sqlbroker.core.distribution import get_shared_files_warning

COMPLETION_VARIABLE = "_SQLBROKER_COMPLETE"
"""Variable by which a shell requests completions."""


def main() -> None:
    """Run the command line; an error of this package becomes a line on stderr and exit code 2.

    With `--json`, these errors and usage errors become a line of JSON.
    """
    if COMPLETION_VARIABLE in os.environ:
        _run_completion()
    if warning := get_shared_files_warning():
        sys.stderr.write(f"warning: {warning}\n")
    try:
        import typer  # noqa: PLC0415 - an extra

        from faststream_sqlbroker.cli.app import app, has_json_option  # noqa: PLC0415 - Typer is an extra
    except ModuleNotFoundError as error:
        if str(error.name).startswith("faststream_sqlbroker"):
            raise
        sys.exit(f"{error.name!r} is not installed: pip install 'sqlbroker[cli]'")
    try:
        # In standalone mode it would print usage errors and exit.
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        sys.exit("Aborted!")
    except Exception as error:
        # Imported late: its base classes import FastStream, which `--help` does not need.
        from faststream_sqlbroker.exceptions import SqlBrokerError  # noqa: PLC0415

        # Click's usage errors, for which Typer may have separate classes.
        if not isinstance(error, SqlBrokerError) and not hasattr(error, "format_message"):
            raise
        if has_json_option(sys.argv[1:]):
            from faststream_sqlbroker.cli.output import print_error  # noqa: PLC0415 - as above

            print_error(getattr(error, "format_message", error.__str__)(), type(error).__name__, 2)
        else:
            message = f"error: {error}\n"
            getattr(error, "show", lambda: sys.stderr.write(message))()
        sys.exit(2)


def _run_completion() -> NoReturn:
    """Answer the shell, without a traceback on failure and without leaving threads running.

    The shell calls the command with a variable set whenever the user presses Tab, and takes what is
    printed as suggestions.
    """
    code: object = 0
    with redirect_stderr(StringIO()), suppress(Exception):
        from faststream_sqlbroker.cli.app import app  # noqa: PLC0415 - Typer is an extra

        try:
            app()
        except SystemExit as end:
            code = end.code
    sys.stdout.flush()
    # Not sys.exit, which would wait for the threads of a slow query.
    os._exit(code if isinstance(code, int) else 0)
