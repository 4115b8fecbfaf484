"""Errors of databases, of Spark and of file systems as `StoreError`."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.exceptions import StoreError


@contextmanager
def store_errors(*others: type[Exception]) -> Iterator[None]:
    """Convert errors of the database and of Spark, and `others`; those of this package pass.

    It is a decorator, too.

    Raises:
        StoreError: the database refused, or cannot be reached; or Spark failed, as where a disk is
            full. Its text is one line, without a file system's user and password.
    """
    try:
        yield
    except SQLAlchemyError as error:
        said = _line(getattr(error, "orig", None) or error)
        raise StoreError(f"the database answered: {said}") from error
    except _spark_errors() as error:
        raise StoreError(f"Spark answered: {_line(error)}") from error
    except others as error:
        raise StoreError(f"the file system answered: {_line(error)}") from error


def _spark_errors() -> tuple[type[Exception], ...]:
    """None where pyspark was not imported: it is an extra, and readers work without it."""
    if "pyspark.sql" not in sys.modules:
        return ()
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
    from pyspark.errors import PySparkException  # noqa: PLC0415 - as above

    return Py4JError, PySparkException


def _line(error: object) -> str:
    """The first line, and the cause that Java names last, without Java's stack."""
    text = re.sub(r"^An error occurred while calling .*\n: ", "", str(error)).strip()
    said = text.splitlines()[:1] or [type(error).__name__]
    said += re.findall(r"^Caused by: (.*)$", text, re.MULTILINE)[-1:]
    return visible(re.sub(r"://\S*@", "://", "; by ".join(said)))
