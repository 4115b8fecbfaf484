"""Errors as one line in shell terms: `broker.admin` names methods and arguments of Python."""

from collections.abc import Iterator
from contextlib import contextmanager

from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import AccessError, SchemaError, SetupError, StoreError
from pyspark_sqlbroker.store_errors import convert_store_errors

SHELL_TERMS = (
    ("broker.admin.subscribers()", "`sqlbroker subscribers`"),
    ("broker.admin.audit()", "`sqlbroker jobs`"),
    ("that dead_letters shows", "that `sqlbroker dead` shows"),
    ("add archived=True", "add --archived"),
    ("omit archived=True", "omit --archived"),
    (
        "after must be the value that the previous call returned",
        "--after must be the value that the previous command printed",
    ),
    ("give ids= or keys=", "give --id or --key"),
    ("give it in ids= as a number", "give --ids with the number alone"),
    ("give exported= (the path of an export), older_than=", "give --exported, --older-than"),
    ("give force=True", "give --force"),
    ("without stop()", "without a stop"),
    (
        "run the migrations, or await broker.create_tables() while developing",
        "run `sqlbroker migrate`, or check that --schema and --message-table are right",
    ),
    ("give archive_partitions=", "give --every day, week or month, and --convert the first time"),
)
"""Python terms in error messages, each with its replacement for the shell."""


@contextmanager
def convert_database_errors() -> Iterator[None]:
    """Convert database and Spark errors to a line in shell terms, with a remedy.

    A traceback could show the URL and its password.

    Raises:
        SetupError: an argument is not valid.
        AccessError: the user lacks a right.
        StoreError: the database refused or cannot be reached, or Spark failed, for example because
            it cannot write files.
    """
    try:
        with convert_store_errors():
            yield
    except NotConnectedError as error:
        raise StoreError(
            f"the database cannot be reached: {error}. Check that its server runs and that the URL "
            "has the right host, port, user and database"
        ) from None
    except (SetupError, AccessError) as error:
        text = _translate_to_shell(str(error))
        # Other subclasses have more arguments than a text, and contain no Python terms.
        if text == str(error) or type(error) not in {SetupError, SchemaError, AccessError}:
            raise
        raise type(error)(text) from None


def _translate_to_shell(text: str) -> str:
    """Replace names of methods and arguments in an error by commands and options.

    The errors are those of the Python API, and the user of a shell knows only the command line.
    """
    for python, shell in SHELL_TERMS:
        text = text.replace(python, shell)
    return text
