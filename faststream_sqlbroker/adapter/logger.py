"""FastStream's default logger."""

from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger

__all__ = ("DefaultLoggerStorage", "get_broker_logger", "make_logger_state")
