"""Errors of databases, of Spark and of file systems as `StoreError`."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.text import replace_invisible
from faststream_sqlbroker.exceptions import StoreError

T = TypeVar("T")

_CALLBACK_FLAG = "_sqlbroker_of_callback"
"""Attribute of errors that the caller's own function has raised."""


@contextmanager
def convert_store_errors(*other_types: type[Exception]) -> Iterator[None]:
    """Convert errors of the database and of Spark, and `other_types`; errors of this package pass.

    This is a decorator, too.

    Raises:
        StoreError: the database refused, or cannot be reached; or Spark failed, for example because
            a disk is full. The text is one line, without a file system's user and password.
    """
    try:
        yield
    except Exception as error:
        error_types: tuple[type[Exception], ...] = (
            SQLAlchemyError,
            *_get_spark_errors(),
            *other_types,
        )
        # An error of the caller's own callback passes unchanged, whatever its class.
        if hasattr(error, _CALLBACK_FLAG) or not isinstance(error, error_types):
            raise
        raise StoreError(_format_error(error)) from error


def wrap_callback(callback: Callable[[T], Any] | None) -> Callable[[T], None]:
    """Return a function that calls `callback`, if given.

    Errors of the callback are marked, and pass `convert_store_errors` unchanged: an OSError of the
    user's own function is not one of the lake's files.
    """

    def call(value: T) -> None:
        """Call the callback, and mark an error as the caller's own."""
        try:
            if callback is not None:
                callback(value)
        except Exception as error:
            setattr(error, _CALLBACK_FLAG, True)
            raise

    return call


def _format_error(error: Exception) -> str:
    """Format who reported the error, and the message."""
    if isinstance(error, SQLAlchemyError):
        return f"the database answered: {_format_line(getattr(error, 'orig', None) or error)}"
    source = "Spark" if isinstance(error, _get_spark_errors()) else "the file system"
    return f"{source} answered: {_format_line(error)}"


def _get_spark_errors() -> tuple[type[Exception], ...]:
    """Return Spark's error classes; none if pyspark, an extra, was not imported."""
    if "pyspark.sql" not in sys.modules:
        return ()
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
    from pyspark.errors import PySparkException  # noqa: PLC0415 - as above

    return Py4JError, PySparkException


def _format_line(error: object) -> str:
    """Return the first line, and the last cause that Java names, without Java's stack.

    Addresses lose the part before the @, which may be a password.
    """
    text = re.sub(r"^An error occurred while calling .*\n: ", "", str(error)).strip()
    lines = text.splitlines()[:1] or [type(error).__name__]
    lines += re.findall(r"^Caused by: (.*)$", text, re.MULTILINE)[-1:]
    return replace_invisible(re.sub(r"://\S*@", "://", "; by ".join(lines)))
