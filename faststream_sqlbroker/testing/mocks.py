"""Mocks whose failed assertions say what waits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

from faststream_sqlbroker.adapter.testing import CallRecorder


class NamingMock(MagicMock):
    """A MagicMock; a failed assertion of a call names the messages that wait, and until when."""

    def _get_child_mock(self, /, **options: Any) -> MagicMock:
        return MagicMock(**options)

    def assert_called(self, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called(*args, **kwargs)

    def assert_called_once(self, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called_once(*args, **kwargs)

    def assert_called_with(self, /, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called_with(*args, **kwargs)

    def assert_called_once_with(self, /, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_called_once_with(*args, **kwargs)

    def assert_any_call(self, /, *args: Any, **kwargs: Any) -> None:
        """As MagicMock's."""
        with saying(self):
            super().assert_any_call(*args, **kwargs)


@contextmanager
def saying(mock: Any) -> Iterator[None]:
    """Add what waits to an AssertionError, once."""
    try:
        yield
    except AssertionError as error:
        describe = mock.__dict__.get("what_waits")
        text = "" if describe is None else describe()
        if not text or text in str(error):
            raise
        raise AssertionError(f"{error}\n{text}") from None


def name_what_waits(recorder: CallRecorder, describe: Callable[[], str]) -> None:
    """Let failed assertions on the calls that `recorder` knows end with what `describe` says."""
    if not isinstance(recorder.mock, NamingMock):
        recorder.mock = NamingMock()
    recorder.mock.__dict__["what_waits"] = describe
