"""Annotations that inject FastStream's context: `async def handle(msg: SqlBrokerMessage)`."""

from typing import Annotated

from faststream.annotations import ContextRepo, Logger
from faststream.params import NoCast
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from faststream_sqlbroker.broker.broker import SqlBroker as Broker
from faststream_sqlbroker.message import SqlBrokerBatchMessage as _BatchMessage
from faststream_sqlbroker.message import SqlBrokerMessage as _Message
from faststream_sqlbroker.subscriber.pipeline.dependency_models import AsyncContext

__all__ = (
    "Broker",
    "ContextRepo",
    "Logger",
    "NoCast",
    "SqlBroker",
    "SqlBrokerBatchMessage",
    "SqlBrokerMessage",
    "SqlConnection",
    "SqlSession",
)

SqlBrokerMessage = Annotated[_Message, AsyncContext("message")]
"""The message that the handler processes."""
SqlBrokerBatchMessage = Annotated[_BatchMessage, AsyncContext("message")]
"""The batch that the handler processes, for subscribers with batch=True."""
SqlBroker = Annotated[Broker, AsyncContext("broker")]
"""The broker that runs the handler."""
SqlConnection = Annotated[AsyncConnection, AsyncContext("sql_transaction.connection")]
"""The connection whose transaction commits together with the ack; requires transactional=True."""
SqlSession = Annotated[AsyncSession, AsyncContext("sql_transaction.session")]
"""A session on the connection of `SqlConnection`; requires transactional=True."""
