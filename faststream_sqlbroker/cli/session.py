"""What the commands that use Spark share: a quiet session, and errors in one line."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.errors import errors_of_the_shell
from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.exceptions import StoreError
from pyspark_sqlbroker.address import parse_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def quiet_session(
    master: str | None = None, jars: Sequence[Path] | None = None, url: str | None = None
) -> "SparkSession":
    """A session without Spark's INFO and WARN lines, with the JDBC driver of the URL's database."""
    kinds = [] if url is None else [parse_address(url).kind]
    return spark.build_session(databases=kinds, master=master, jars=jars or (), config=QUIET)


@contextmanager
def database_errors() -> Iterator[None]:
    """Errors of the database and of Spark as one line, and words of the shell: a traceback could
    show the URL, and its password.

    Raises:
        StoreError: the database refused, or does not answer; or Spark failed, as where it cannot
            write files.
    """
    try:
        with errors_of_the_shell():
            yield
    except SQLAlchemyError as error:
        raise StoreError(
            f"the database answered: {_line(getattr(error, 'orig', None) or error)}"
        ) from None
    except _spark_errors() as error:
        raise StoreError(f"Spark answered: {_line(error)}") from None


def _spark_errors() -> tuple[type[Exception], ...]:
    """None where pyspark is not installed."""
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - pyspark is an extra
        from pyspark.errors import PySparkException  # noqa: PLC0415 - as above
    except ModuleNotFoundError:
        return ()
    return Py4JError, PySparkException


def _line(error: object) -> str:
    """The first line, without Java's stack, and without a file system's user and password."""
    said = re.sub(r"^An error occurred while calling .*\n: ", "", str(error)).strip().splitlines()
    return visible(re.sub(r"://\S*@", "://", said[0])) if said else type(error).__name__
