"""The test broker, and the record of calls that handlers and publishers are asked about."""

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
