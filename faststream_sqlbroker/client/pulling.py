"""A client of pull consumers over HTTP."""

import base64
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from faststream_sqlbroker.client.answers import HeldOverHttp, HttpUser
from faststream_sqlbroker.core.channels import LONGEST_TIMEOUT
from faststream_sqlbroker.exceptions import HttpError, SetupError

_LEASE = "X-Broker-Lease"
_BASE64 = ";base64"
_NOT_FREE = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT})
"""What a job is answered that another client has ended, or whose queue is paused."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that may be taken."""

    id: str
    priority: int
    message_id: str
    """What the jobs of one message have in common, at all consumers of the channel."""
    payload: bytes
    content_type: str


class PullConsumer(HttpUser):
    """A pull consumer of a channel, as its own service sees it.

    Raises (from every method):
        HttpError: the server refused, such as wrong tokens.
        httpx.HTTPError: it could not be reached, or took longer than 30 s.
    """

    def __init__(
        self,
        url: str,
        *,
        channel: str,
        consumer: str,
        channel_token: str,
        consumer_token: str,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: Where the application is mounted, as https://shop.example/broker.
            channel: The channel's id.
            consumer: The consumer's id.
            channel_token: Told when the channel was made.
            consumer_token: Told when the consumer was made.
            http: A client to use, which its caller closes; None makes one.
        """
        super().__init__(http)
        self._base = f"{url.rstrip('/')}/channel/{channel}/consumer/{consumer}"
        self._tokens = {
            "X-Broker-Channel-Token": channel_token,
            "X-Broker-Consumer-Token": consumer_token,
        }

    async def jobs(self, limit: int = 25) -> AsyncIterator[QueuedJob]:
        """The jobs that may be taken, the highest priority first, page by page.

        Args:
            limit: Jobs of a page, up to 100.
        """
        # The link to the next page is followed with this client's own tokens.
        query: Mapping[str, str] = {"limit": str(limit)}
        while True:
            page = await self._page(query)
            for each in page.json()["Result"]:
                yield _queued(each)
            following = page.links.get("next")
            if following is None:
                return
            query = dict(httpx.URL(following["url"]).params)

    async def take_any(self, limit: int = 25, *, longer: int | None = None) -> "TakenJob | None":
        """Take one of the jobs of the first page, at the highest priority that is free.

        Among equal priorities the order is random: all clients see the same page, and in its order
        most would ask for a job that another one has just taken.

        Args:
            limit: Jobs of the page, up to 100: a few for each client that asks at the same time.
            longer: As of `take`.

        Returns:
            The job; None if there is none, or others were faster with all of the page.

        Raises:
            SetupError: as `take`.
        """
        page = await self._page({"limit": str(limit)})
        jobs = [_queued(each) for each in page.json()["Result"]]
        random.shuffle(jobs)
        jobs.sort(key=_by_priority)
        for job in jobs:
            if (taken := await self.take(job, longer=longer)) is not None:
                return taken
        return None

    async def _page(self, query: Mapping[str, str]) -> httpx.Response:
        return await self.send("GET", "/queued-jobs", query=query)

    async def take(self, job: QueuedJob, *, longer: int | None = None) -> "TakenJob | None":
        """Take a job; None: another client has it, or it may not be taken now.

        Args:
            job: One of `jobs`.
            longer: Seconds to add to the timeout that the server gives.

        Raises:
            SetupError: `longer` is no whole number, less than 0, or more than ten years.
        """
        body: dict[str, Any] = {"NextState": "INFLIGHT"}
        if longer is not None:
            # The server's 400 would look like that of a job which is not free.
            if type(longer) is not int or not 0 <= longer <= LONGEST_TIMEOUT:
                allowed = f"a whole number of seconds, 0 to {LONGEST_TIMEOUT}"
                raise SetupError(f"longer is {allowed}, got {longer!r}")
            body["IncrementalTimeout"] = longer
        try:
            answer = await self.send("POST", f"/job/{job.id}", body=body)
        except HttpError as error:
            if error.status in _NOT_FREE:
                return None
            raise
        # Without a lease it was in flight already.
        lease = answer.headers.get(_LEASE)
        return None if lease is None else TakenJob(self, job, lease)

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        taken: "TakenJob | None" = None,
    ) -> httpx.Response:
        """Send one request below the consumer's path; the answer."""
        headers = self._tokens if taken is None else {**self._tokens, _LEASE: taken.lease}
        lost = None if taken is None else taken.lost
        url = self._base + path
        return await self.request(method, url, lost=lost, json=body, params=query, headers=headers)


class TakenJob(HeldOverHttp):
    """A job that this client has taken.

    Used as a context manager, it is delivered at a normal end. After an exception it is left as it
    is: when its time is over, it is queued again.

    Raises (from every method):
        LeaseLostError: its time is over, and another client may have it; nothing was changed.
        HttpError, httpx.HTTPError: as `PullConsumer`.
    """

    def __init__(self, consumer: PullConsumer, job: QueuedJob, lease: str) -> None:
        super().__init__()
        self.job = job
        self.lease = lease
        self._consumer = consumer

    @property
    def lost(self) -> str:
        """What to say when the lease is lost."""
        return (
            f"lease lost: job {self.job.id} may have another client, so nothing was changed; take "
            "it with a longer time, or call heartbeat() in time"
        )

    async def delivered(self) -> None:
        """It is done."""
        await self._end("DELIVERED")

    async def dead(self) -> None:
        """It cannot be done: it is not tried again by itself."""
        await self._end("DEAD")

    async def heartbeat(self, longer: int = 0) -> None:
        """Extend its time to the server's timeout and `longer` seconds from now."""
        body = {"IncrementalTimeout": longer}
        await self._send(f"/job/{self.job.id}/heartbeat", body)

    async def _end(self, state: str) -> None:
        await self._send(f"/job/{self.job.id}", {"NextState": state})
        self._ended = True

    async def _send(self, path: str, body: Mapping[str, Any]) -> None:
        await self._consumer.send("POST", path, body=body, taken=self)

    async def _finish(self) -> None:
        await self.delivered()


def _by_priority(job: QueuedJob) -> int:
    return -job.priority


def _queued(shown: Mapping[str, Any]) -> QueuedJob:
    message = shown["Message"]
    kind: str = message["ContentType"]
    payload = message["Payload"].encode()
    if kind.endswith(_BASE64):
        kind = kind.removesuffix(_BASE64)
        payload = base64.b64decode(payload)
    return QueuedJob(shown["ID"], shown["Priority"], message["MessageID"], payload, kind)
