"""A queue over HTTP, for tests."""

from typing import Any

import httpx

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Queues, QueueTokens
from tests.http.conftest import client_of, logins
from tests.http.known import CONSUME, PATH, PUBLISH, bearer
from tests.http.known import SHOP as QUEUE

__all__ = ("CONSUME", "PATH", "PUBLISH", "QUEUE", "bearer")


def queues(**options: Any) -> Queues:
    """One queue with both tokens."""
    tokens = QueueTokens(publish=PUBLISH, consume=CONSUME)
    return Queues(queues={QUEUE: tokens}, **options)


class Queueing:
    """A client of the queue."""

    def __init__(self, broker: SqlBroker, **options: Any) -> None:
        self.app = broker.asgi(logins(), queues=queues(**options))
        self.http: httpx.AsyncClient = client_of(self.app, timeout=90)

    async def post(self, path: str, body: Any, token: str = CONSUME) -> httpx.Response:
        """A request below the queue."""
        return await self.http.post(f"{PATH}{path}", json=body, headers=bearer(token))

    async def publish(self, body: Any, **options: Any) -> int | None:
        """Publish one; its id."""
        answer = await self.post("/publish", {"body": body, **options}, PUBLISH)
        assert answer.status_code in {200, 201}, answer.text
        found: int | None = answer.json()["id"]
        return found

    async def reserve(self, **options: Any) -> list[dict[str, Any]]:
        """What can be taken."""
        answer = await self.post("/reserve", {"lease_seconds": 3600, **options})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["messages"]
        return found

    async def end(
        self, message: dict[str, Any], how: str = "commit", **fields: Any
    ) -> httpx.Response:
        """Commit, roll back or extend it."""
        body = {"lease_token": message["lease_token"], **fields}
        return await self.post(f"/messages/{message['id']}/{how}", body)
