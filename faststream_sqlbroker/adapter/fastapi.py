"""FastStream's router for FastAPI; requires FastAPI."""

from faststream._internal.fastapi import Context, StreamMessage, StreamRouter
from faststream._internal.fastapi.context import ContextRepo, Logger

__all__ = ("Context", "ContextRepo", "Logger", "StreamMessage", "StreamRouter")
