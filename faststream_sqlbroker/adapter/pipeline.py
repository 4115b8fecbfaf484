"""Parts of FastStream that the compiled pipeline replaces or calls."""

from faststream._internal.configs.broker import ConfigComposition
from faststream._internal.context import Context, ContextRepo
from faststream._internal.context.composition import ContextRepoComposition
from faststream._internal.context.repository import ContextScope
from faststream._internal.context.resolve import resolve_context_by_name
from faststream._internal.endpoint.call_wrapper import HandlerCallWrapper
from faststream._internal.endpoint.subscriber.call_item import HandlerItem
from faststream._internal.endpoint.subscriber.usecase import SubscriberUsecase
from faststream._internal.endpoint.subscriber.utils import default_filter
from faststream._internal.logger.logger_proxy import EmptyLoggerObject
from faststream._internal.logger.state import LoggerState
from faststream._internal.middlewares import BaseMiddleware

__all__ = (
    "BaseMiddleware",
    "ConfigComposition",
    "Context",
    "ContextRepo",
    "ContextRepoComposition",
    "ContextScope",
    "EmptyLoggerObject",
    "HandlerCallWrapper",
    "HandlerItem",
    "LoggerState",
    "SubscriberUsecase",
    "default_filter",
    "resolve_context_by_name",
)
