"""What commands that use Spark share: a session that says little, and the database's errors in one line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker import spark
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.spark.address import parse_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}


def quiet_session(
    master: str | None = None, jars: Sequence[Path] | None = None, url: str | None = None
) -> "SparkSession":
    """A session that says little; with the driver of the URL's database."""
    kinds = [] if url is None else [parse_address(url).kind]
    return spark.build_session(databases=kinds, master=master, jars=jars or (), config=QUIET)


@contextmanager
def database_errors() -> Iterator[None]:
    """The database's errors as one line: a traceback could show the URL, and its password.

    Raises:
        StoreError: the database refused, or does not answer.
    """
    try:
        yield
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise StoreError(f"the database answered: {reason[0] if reason else type(error).__name__}") from None
