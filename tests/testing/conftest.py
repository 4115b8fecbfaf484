"""A broker whose database must not be contacted."""

from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker


def unreachable(**options: Any) -> SqlBroker:
    """A broker of PostgreSQL that fails the test as soon as it connects."""
    engine = create_async_engine("postgresql+asyncpg://user@nowhere.invalid/none")

    @event.listens_for(engine.sync_engine, "do_connect")
    def refuse(*_: Any) -> None:
        raise AssertionError("the user's engine was contacted")

    return SqlBroker(engine, **options)


@pytest.fixture
def broker() -> SqlBroker:
    return unreachable()
