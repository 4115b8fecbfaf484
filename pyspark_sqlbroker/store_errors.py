"""Errors of databases, of Spark and of file systems as `StoreError`."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.exceptions import StoreError

T = TypeVar("T")

_MARK = "_sqlbroker_of_callback"
"""Attribute of errors that the caller's own function has raised."""


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
    except Exception as error:
        kinds: tuple[type[Exception], ...] = (SQLAlchemyError, *_spark_errors(), *others)
        if hasattr(error, _MARK) or not isinstance(error, kinds):
            raise
        raise StoreError(_describe(error)) from error


def keep_errors(callback: Callable[[T], Any] | None) -> Callable[[T], None]:
    """A function that calls `callback`, if there is one; its errors pass `store_errors` as they
    are.
    """

    def call(value: T) -> None:
        try:
            if callback is not None:
                callback(value)
        except Exception as error:
            setattr(error, _MARK, True)
            raise

    return call


def _describe(error: Exception) -> str:
    """Who has answered, and what."""
    if isinstance(error, SQLAlchemyError):
        return f"the database answered: {_line(getattr(error, 'orig', None) or error)}"
    who = "Spark" if isinstance(error, _spark_errors()) else "the file system"
    return f"{who} answered: {_line(error)}"


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
