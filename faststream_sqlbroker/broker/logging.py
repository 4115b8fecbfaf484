"""The broker's default logger: FastStream's, with a column for the queue."""

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
"""Characters of the column for message ids; longer ids make their line longer."""
QUEUE_WIDTH = 4
"""Characters of the column for queues, at least."""


class QueueLoggerStorage(DefaultLoggerStorage):
    """Makes the default logger; its column for queues is as wide as the longest name."""

    def __init__(self) -> None:
        super().__init__()
        self._queue_width = QUEUE_WIDTH
        self.logger_log_level = logging.INFO

    def set_level(self, level: int) -> None:
        """Write lines of `level` and above."""
        self.logger_log_level = level

    def register_subscriber(self, params: dict[str, Any]) -> None:
        """Widen the column to the names of a subscriber's queues."""
        self._queue_width = max(self._queue_width, len(params.get("queue", "")))

    def get_logger(self, *, context: "ContextRepo") -> "LoggerProto":
        """The logger; it is made at the first call."""
        if found := self._get_logger_ref():
            return found
        made = get_broker_logger(
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
        self._logger_ref.add(made)
        return made


make_queue_logger_state = partial(make_logger_state, default_storage_cls=QueueLoggerStorage)


def passing_level(logger: Any) -> int:
    """A level of which `logger` writes lines, whatever its own level and those of its handlers."""
    if not isinstance(logger, logging.Logger):
        return logging.CRITICAL  # its levels are not known; loguru's and structlog's end there, too
    levels = [logging.DEBUG, logger.getEffectiveLevel(), logger.manager.disable + 1]
    found: logging.Logger | None = logger
    handlers: list[logging.Handler] = []
    while found is not None:
        handlers += found.handlers
        found = found.parent if found.propagate else None
    if handlers:
        levels.append(min(handler.level for handler in handlers))
    return max(levels)
