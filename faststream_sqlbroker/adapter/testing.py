"""The test broker, and the recorded calls for assertions about handlers and publishers."""

from faststream._internal.endpoint.call_wrapper import HandlerCallWrapper
from faststream._internal.testing.broker import EnterType, TestBroker
from faststream._internal.testing.calls import (
    BrokerFields,
    CallAssertions,
    CallRecorder,
    ExpectedCall,
)

__all__ = (
    "BrokerFields",
    "CallAssertions",
    "CallRecorder",
    "EnterType",
    "ExpectedCall",
    "HandlerCallWrapper",
    "TestBroker",
)
