"""Unit tests of handlers without a database: `TestSqlBroker`, and time that the test advances."""

from faststream import TestApp

from faststream_sqlbroker.testing.broker import TestSqlBroker
from faststream_sqlbroker.testing.clock import VirtualClock
from faststream_sqlbroker.testing.reports import Attempt, Drained, Published, Waiting

__all__ = ("Attempt", "Drained", "Published", "TestApp", "TestSqlBroker", "VirtualClock", "Waiting")
