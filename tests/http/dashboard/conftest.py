"""A broker whose tables hold something of everything, under names that are attacks."""

import html
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from faststream_sqlbroker import NoRetryStrategy, SqlBroker
from faststream_sqlbroker.core.channels import Channels
from faststream_sqlbroker.http.dashboard import routes
from tests.helpers import eventually
from tests.http.conftest import client_of, logins

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
"""What would run if a page showed it as it is."""
NEED_MORE = {"/ui/queue", "/ui/diagnosis"}
PAGES = (
    *(path for path in routes.PAGES if "{" not in path and path not in NEED_MORE),
    "/ui/messages?archived=on",
    "/ui/verify?run=on",
    "/ui/mirror?lookup=invoices",
)
"""The pages that need to be told of nothing, and that operators may see."""


async def fill(broker: SqlBroker, name: str) -> dict[str, int]:
    """Messages that wait, have failed, and are held; their ids by what they are."""
    waits = await broker.publish({name: name}, name, key=name, headers={name: name})

    @broker.subscriber(f"bad {name}", retry_strategy=NoRetryStrategy())
    async def fail(_body: dict) -> None:
        raise ValueError(name)

    @broker.subscriber(f"good {name}")
    async def work(_body: dict) -> None: ...

    failed = await broker.publish({name: name}, f"bad {name}", headers={name: name})
    done = await broker.publish({name: name}, f"good {name}")
    await broker.start()
    await ended(broker, failed)
    await ended(broker, done)
    await broker.admin.pause(name, reason=name, by=name)
    return {"waits": waits, "failed": failed, "done": done}


async def ended(broker: SqlBroker, message_id: int) -> None:
    """Wait until it is in the archive."""

    async def archived() -> bool:
        found = await broker.admin.message(message_id)
        return found is not None and found.message.archived_at is not None

    await eventually(archived, timeout=60)


async def token_of(client: httpx.AsyncClient, auth: tuple[str, str]) -> str:
    found: str = (await client.get("/csrf-token", auth=auth)).json()["token"]
    return found


def hidden(page: str, name: str) -> str:
    """The value of a hidden field."""
    found = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert found is not None, page
    return html.unescape(found[1])


@pytest.fixture
async def full_web(broker: SqlBroker) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with all options."""
    async with client_of(broker.asgi(logins(), channels=Channels())) as client:
        yield client


async def post(
    client: httpx.AsyncClient, path: str, auth: tuple[str, str], **fields: Any
) -> httpx.Response:
    """Send a form as a page of this application would."""
    data = {"csrf": await token_of(client, auth), **fields}
    return await client.post(path, auth=auth, data=data, headers={"Origin": "http://broker.test"})
