"""A channel with pull consumers, over HTTP."""

from collections.abc import Mapping
from typing import Any

import httpx

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Channel, Channels, Consumer
from tests.http.conftest import as_user, client_of, logins
from tests.http.known import CHANNEL, CONSUMER, JOBS, LEASE, TOKENS

__all__ = ("CHANNEL", "CONSUMER", "JOBS", "LEASE", "QUEUE", "TOKENS")

QUEUE = f"{CHANNEL}/{CONSUMER}"


def channels(*others: str, **options: Any) -> Channels:
    """One channel with the pull consumer billing, and `others`, which have the same token."""
    token = TOKENS["X-Broker-Consumer-Token"]
    consumers = {name: Consumer(type="pull", token=token) for name in (CONSUMER, *others)}
    of_channel = Channel(token=TOKENS["X-Broker-Channel-Token"], consumers=consumers)
    # Long: a lease ends when the test says so, however busy the machine is.
    return Channels(channels={CHANNEL: of_channel}, **{"stop_timeout": "1h", **options})


class Pulling:
    """A client of one consumer."""

    def __init__(self, broker: SqlBroker, *others: str, consumer: str = CONSUMER, **options: Any):
        self.app = broker.asgi(logins(), channels=channels(*others, **options))
        self.http: httpx.AsyncClient = client_of(self.app)
        self.jobs = f"/channel/{CHANNEL}/consumer/{consumer}"

    def of(self, consumer: str) -> "Pulling":
        """The same application for another consumer."""
        other = object.__new__(Pulling)
        other.app = self.app
        other.http = self.http
        other.jobs = f"/channel/{CHANNEL}/consumer/{consumer}"
        return other

    async def broadcast(
        self, body: bytes = b'{"id": 1}', kind: str | None = "application/json", priority: int = 0
    ) -> str:
        """Publish; the id of the message."""
        headers = {**TOKENS, "X-Broker-Message-Priority": str(priority)}
        if kind is not None:
            headers["Content-Type"] = kind
        found = await self.http.post(f"/channel/{CHANNEL}/broadcast", content=body, headers=headers)
        assert found.status_code == 201, found.text
        message: str = found.json()["MessageID"]
        return message

    async def queued(self, query: str = "") -> list[dict[str, Any]]:
        """The jobs of a page."""
        found = await self.page(query)
        assert found.status_code == 200, found.text
        result: list[dict[str, Any]] = found.json()["Result"]
        return result

    async def page(self, query: str = "") -> httpx.Response:
        """A page as it comes."""
        return await self.http.get(f"{self.jobs}/queued-jobs{query}", headers=TOKENS)

    async def post(
        self, job: str, state: Any, *, lease: str | None = None, **fields: Any
    ) -> httpx.Response:
        """Ask for a state."""
        headers = TOKENS if lease is None else {**TOKENS, LEASE: lease}
        body = {"NextState": state, **fields}
        return await self.http.post(f"{self.jobs}/job/{job}", json=body, headers=headers)

    async def start(self, job: str, **fields: Any) -> str:
        """Take a job; its lease."""
        found = await self.post(job, "INFLIGHT", **fields)
        assert found.status_code == 202, found.text
        lease: str = found.headers[LEASE]
        return lease

    async def show(self, job: str) -> dict[str, Any]:
        """The job as it is now."""
        found = await self.http.get(f"{self.jobs}/job/{job}", headers=TOKENS)
        assert found.status_code == 200, found.text
        shown: dict[str, Any] = found.json()
        return shown

    async def state(self, job: str) -> tuple[str, int]:
        """Where the job is, and how often it was started again."""
        shown = await self.show(job)
        return shown["State"], shown["RetryCount"]

    async def put(
        self, path: str, form: Mapping[str, str] | None = None, user: str = "ann"
    ) -> httpx.Response:
        """A write of an administrator."""
        return await self.http.put(path, data=form, auth=as_user(user))
