"""What a case records while it runs: calls, values, the context, log lines, rows."""

import re
import threading
from typing import Any

from faststream.message import StreamMessage

from faststream_sqlbroker.core.rows import ClaimedMessage


class Seen:
    """Everything that happened in one run of a case, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def add(self, *event: Any) -> None:
        """Something has happened."""
        self.events.append(tuple(shown(part) for part in event))

    def context(self, tag: str, context: Any) -> None:
        """All of FastStream's context, and the kind of thread that sees it."""
        known = {name: shown(value) for name, value in sorted(context.context.items())}
        in_main = threading.current_thread() is threading.main_thread()
        self.events.append((tag, known, in_main))


class Log:
    """A logger that records; with `fails` it raises at lines that hold this text."""

    def __init__(self, seen: Seen, fails: str = "") -> None:
        self._seen = seen
        self._fails = fails

    def log(
        self, level: int, msg: Any, /, *, exc_info: Any = None, extra: Any = None, **more: Any
    ) -> None:
        """Record one line."""
        self._seen.add("log", level, str(msg), dict(extra or {}), exc_info, more)
        if self._fails and self._fails in str(msg):
            raise OSError("the log is full")


def shown(value: Any) -> str:
    """`value` as text that is the same in each run, with all that can be asked of a message."""
    if isinstance(value, ClaimedMessage):
        return f"row {value.id}"
    if isinstance(value, StreamMessage):
        _ = value.message_id, value.correlation_id  # made on the first read
        own = {k: shown(v) for k, v in sorted(vars(value).items()) if k not in _HIDDEN}
        return f"{type(value).__name__} {own}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    if type(value).__module__.partition(".")[0] in _OPAQUE:
        return type(value).__name__
    return _RANDOM_ID.sub("a random id", _ADDRESS.sub("", repr(value)))


def errors(error: BaseException | None, depth: int = 5) -> Any:
    """An error with what it was caused by."""
    if error is None or not depth:
        return None
    return (
        type(error).__name__,
        _ADDRESS.sub("", str(error)),
        errors(error.__cause__, depth - 1),
        errors(error.__context__, depth - 1),
        error.__suppress_context__,
    )


_ADDRESS = re.compile(r"( at)? 0x[0-9a-f]+|\.\.\.[0-9a-f]*>")
_RANDOM_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
"""Of a publish whose correlation id a middleware reads; messages' own are of another version."""
_HIDDEN = frozenset({"_parse", "_messages"})
_OPAQUE = frozenset({"faststream", "faststream_sqlbroker", "logging"})
