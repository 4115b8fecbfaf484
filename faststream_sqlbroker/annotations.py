"""Annotations that inject FastStream's context into handlers: `async def handle(msg:
SqlBrokerMessage)`.
"""

from typing import Annotated, Any

from faststream.annotations import ContextRepo, Logger
from faststream.params import NoCast
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from faststream_sqlbroker.adapter.values import Context
from faststream_sqlbroker.broker.broker import SqlBroker as Broker
from faststream_sqlbroker.message import SqlBrokerBatchMessage as _BatchMessage
from faststream_sqlbroker.message import SqlBrokerMessage as _Message

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


class _Context(Context):
    """A Context whose `use` is a coroutine.

    FastStream runs a plain `use` in a thread, once per parameter, which is slower.
    """

    async def use(self, /, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().use(**kwargs)


SqlBrokerMessage = Annotated[_Message, _Context("message")]
"""The message that the handler is given."""
SqlBrokerBatchMessage = Annotated[_BatchMessage, _Context("message")]
"""The batch that the handler is given; for subscribers with batch=True."""
SqlBroker = Annotated[Broker, _Context("broker")]
"""The broker that runs the handler."""
SqlConnection = Annotated[AsyncConnection, _Context("sql_transaction.connection")]
"""The connection whose transaction commits with the ack; needs transactional=True."""
SqlSession = Annotated[AsyncSession, _Context("sql_transaction.session")]
"""A session on that connection."""
