"""The broker's default logger: FastStream's logger with a column for the queue."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.adapter.broker import (
    DefaultLoggerStorage,
    get_broker_logger,
    make_logger_state,
)

if TYPE_CHECKING:
    from faststream import ContextRepo

    from faststream_sqlbroker.adapter.values import LoggerProto

MESSAGE_ID_WIDTH = 10
"""Characters of the column for message ids; a longer id makes its line longer."""
QUEUE_WIDTH = 4
"""Minimum characters of the column for queues."""


class QueueLoggerStorage(DefaultLoggerStorage):
    """Creates the default logger, with a queue column as wide as the longest name."""

    def __init__(self) -> None:
        super().__init__()
        self._queue_width = QUEUE_WIDTH
        self.logger_log_level = logging.INFO

    def set_level(self, level: int) -> None:
        """Set the minimum level of log lines."""
        self.logger_log_level = level

    def register_subscriber(self, params: dict[str, Any]) -> None:
        """Widen the column to the names of a subscriber's queues."""
        self._queue_width = max(self._queue_width, len(params.get("queue", "")))

    def get_logger(self, *, context: "ContextRepo") -> "LoggerProto":
        """Return the logger, created on the first call."""
        if logger := self._get_logger_ref():
            return logger
        new_logger = get_broker_logger(
            name="sqlbroker",
            default_context={"queue": ""},
            message_id_ln=MESSAGE_ID_WIDTH,
            fmt=(
                "%(asctime)s %(levelname)-8s - "
                f"%(queue)-{self._queue_width}s | %(message_id)-{MESSAGE_ID_WIDTH}s - %(message)s"
            ),
            context=context,
            log_level=self.logger_log_level,
        )
        self._logger_ref.add(new_logger)
        return new_logger


make_queue_logger_state = partial(make_logger_state, default_storage_cls=QueueLoggerStorage)


def find_enabled_level(logger: Any) -> int:
    """Return a level at which `logger` writes lines, whatever its own level and its handlers'.

    For lines that the user requested for single messages by the debug header.
    """
    if not isinstance(logger, logging.Logger):
        return logging.CRITICAL  # levels unknown; loguru and structlog end here, too
    # `logging.disable` suppresses all levels up to `manager.disable`.
    levels = [logging.DEBUG, logger.getEffectiveLevel(), logger.manager.disable + 1]
    current: logging.Logger | None = logger
    handlers: list[logging.Handler] = []
    while current is not None:
        handlers += current.handlers
        current = current.parent if current.propagate else None
    if handlers:
        levels.append(min(handler.level for handler in handlers))
    return max(levels)
