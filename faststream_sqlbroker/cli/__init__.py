"""The command `sqlbroker`: `pip install "sqlbroker[cli]"`."""

import sys

from faststream_sqlbroker.core.distribution import shared_files_warning


def main() -> None:
    """Run the command line; errors of this package are one line on stderr and exit code 2."""
    if warning := shared_files_warning():
        sys.stderr.write(f"warning: {warning}\n")
    try:
        from faststream_sqlbroker.cli.app import app  # noqa: PLC0415 - Typer is an extra
    except ModuleNotFoundError as error:
        if str(error.name).startswith("faststream_sqlbroker"):
            raise
        sys.exit(f"{error.name!r} is not installed: pip install 'sqlbroker[cli]'")
    try:
        app()
    except Exception as error:
        # Not before: its base classes import FastStream, which `--help` does without.
        from faststream_sqlbroker.exceptions import SqlBrokerError  # noqa: PLC0415

        if not isinstance(error, SqlBrokerError):
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
