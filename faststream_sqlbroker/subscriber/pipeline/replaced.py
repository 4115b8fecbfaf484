"""The functions of FastStream and FastDepends that the compiled pipeline replaces, by group."""

import sys
from typing import Any

from fast_depends import use, utils
from fast_depends.core import CallModel
from fast_depends.dependencies.provider import Provider
from fast_depends.library.serializer import Serializer
from fast_depends.pydantic import serializer as pydantic
from faststream.message import StreamMessage
from faststream.message import utils as message_utils
from faststream.middlewares import logging as critical
from faststream.middlewares.acknowledgement import middleware as acknowledgement
from faststream.response import BatchPublishCommand, PublishCommand, Response
from faststream.response import utils as response

from faststream_sqlbroker.adapter.broker import BrokerUsecase, FastDependsConfig
from faststream_sqlbroker.adapter.endpoints import PublisherUsecase
from faststream_sqlbroker.adapter.messages import DefaultCodec
from faststream_sqlbroker.adapter.pipeline import (
    BaseMiddleware,
    ConfigComposition,
    Context,
    ContextRepo,
    ContextRepoComposition,
    ContextScope,
    HandlerCallWrapper,
    HandlerItem,
    LoggerState,
    SubscriberUsecase,
    default_filter,
    resolve_context_by_name,
)

PIPELINE = "pipeline"
"""The path of a message. If one of these functions is unknown, FastStream's own pipeline runs."""
ARGUMENTS = "arguments"
"""The arguments of a handler. If one of these functions is unknown, FastDepends builds the
arguments.
"""

PUBLISHING = "publishing"
"""A publish without options, and an answer. If one of these functions is unknown, FastStream
publishes.
"""

OwnedNames = tuple[Any, tuple[str, ...]]
"""A class or a module, and names of its functions."""

REPLACED: dict[str, tuple[OwnedNames, ...]] = {
    PIPELINE: (
        (
            SubscriberUsecase,
            (
                "process_message",
                "_SubscriberUsecase__build__middlewares_stack",
                "_SubscriberUsecase__get_response_publisher",
                "_broker_middlewares",
            ),
        ),
        (HandlerItem, ("is_suitable", "call")),
        (HandlerCallWrapper, ("call_wrapped", "trigger", "set_wrapped")),
        (acknowledgement.AcknowledgementMiddleware, ("__init__", "__call__")),
        (
            acknowledgement._AcknowledgementMiddleware,
            (
                *("__init__", "consume_scope", "__aexit__"),
                "_AcknowledgementMiddleware__do_with_logging",
                "_AcknowledgementMiddleware__resolve_message",
                "_AcknowledgementMiddleware__ack",
            ),
        ),
        (critical.CriticalLogMiddleware, ("__init__", "__call__")),
        (critical._LoggingMiddleware, ("__init__", "consume_scope", "__aexit__")),
        (
            BaseMiddleware,
            (
                *("__init__", "__aenter__", "__aexit__", "on_receive", "after_processed"),
                *("consume_scope", "publish_scope"),
            ),
        ),
        (StreamMessage, ("__init__", "set_decoder", "decode", "ack")),
        (ContextRepo, ("set_local", "reset_local", "get_local", "scope", "scopes", "clear")),
        (ContextRepoComposition, ("__init__", "set_local", "reset_local", "get_local", "clear")),
        (ContextScope, ("__init__", "__enter__", "__exit__")),
        (
            ConfigComposition,
            (
                *("broker_config", "broker_middlewares", "extra_context", "add_config", "reset"),
                *("context", "logger"),
            ),
        ),
        (LoggerState, ("log",)),
        (sys.modules[default_filter.__module__], ("default_filter",)),
        (response, ("ensure_response",)),
    ),
    ARGUMENTS: (
        (FastDependsConfig, ("build_call", "__or__")),
        (sys.modules[FastDependsConfig.__module__], ("_unwrap_message_to_fast_depends_decorator",)),
        (CallModel, ("__init__", "flat_params", "_solve", "_cast_response", "asolve")),
        (Provider, ("get_dependant", "add_dependant", "override")),
        (use, ("_wrap_inject",)),
        (utils, ("run_async", "run_in_threadpool", "solve_generator_async")),
        (Serializer, ("__init__", "response")),
        (pydantic._PydanticSerializer, ("__init__", "__call__")),
        (pydantic._PydanticSerializerWithResponse, ("__init__", "response")),
        (Context, ("__init__", "use")),
        (sys.modules[resolve_context_by_name.__module__], ("resolve_context_by_name",)),
        (ContextRepo, ("get", "resolve")),
        (ContextRepoComposition, ("get", "resolve")),
    ),
    PUBLISHING: (
        (BrokerUsecase, ("connect", "middlewares", "_basic_publish")),
        (PublisherUsecase, ("_basic_publish", "_build_middlewares_stack")),
        (Response, ("__init__", "as_publish_command")),
        (PublishCommand, ("__init__", "add_headers")),
        (BatchPublishCommand, ("__init__",)),
        (DefaultCodec, ("encode",)),
        (message_utils, ("encode_message",)),
    ),
}
