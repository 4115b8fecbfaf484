"""Types of arguments, and the value of an omitted argument."""

from faststream._internal.basic_types import LoggerProto
from faststream._internal.constants import EMPTY
from faststream._internal.types import (
    AsyncCallable,
    BrokerMiddleware,
    CustomCallable,
    IdGenerator,
    P_HandlerParams,
    PublisherMiddleware,
    T_HandlerReturn,
)

__all__ = (
    "EMPTY",
    "AsyncCallable",
    "BrokerMiddleware",
    "CustomCallable",
    "IdGenerator",
    "LoggerProto",
    "P_HandlerParams",
    "PublisherMiddleware",
    "T_HandlerReturn",
)
