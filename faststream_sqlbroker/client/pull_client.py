"""Client of pull consumers over HTTP."""

import base64
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from faststream_sqlbroker.client.transport import HttpClient, LeasedItem
from faststream_sqlbroker.core.channels import MAX_TIMEOUT
from faststream_sqlbroker.exceptions import HttpError, SetupError

_LEASE = "X-Broker-Lease"
_BASE64 = ";base64"
_UNAVAILABLE = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT})
"""Statuses for a job that another client has taken, or whose queue is paused."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that may be taken."""

    id: str
    priority: int
    message_id: str
    """Common id of all jobs of one message, at all consumers of the channel."""
    payload: bytes
    content_type: str


class PullConsumer(HttpClient):
    """A pull consumer of a channel, for the service that handles the jobs.

    Raises (from every method):
        HttpError: the server refused, for example because of wrong tokens.
        httpx.HTTPError: the server could not be reached, or took longer than 30 s.
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
        """Create a client; no request is sent yet.

        Args:
            url: URL of the mounted application, such as https://shop.example/broker.
            channel: The channel's id.
            consumer: The consumer's id.
            channel_token: Token from the creation of the channel.
            consumer_token: Token from the creation of the consumer.
            http: Client to use, which the caller closes; by default a client is created.
        """
        super().__init__(http)
        self._base = f"{url.rstrip('/')}/channel/{channel}/consumer/{consumer}"
        self._tokens = {
            "X-Broker-Channel-Token": channel_token,
            "X-Broker-Consumer-Token": consumer_token,
        }

    async def jobs(self, limit: int = 25) -> AsyncIterator[QueuedJob]:
        """Yield the jobs that may be taken, the highest priority first, page by page.

        Args:
            limit: Jobs per page, up to 100.
        """
        # Only the query of the link is used, with this client's base URL and tokens.
        query: Mapping[str, str] = {"limit": str(limit)}
        while True:
            page = await self._load_page(query)
            for job in page.json()["Result"]:
                yield _parse_job(job)
            next_link = page.links.get("next")
            if next_link is None:
                return
            query = dict(httpx.URL(next_link["url"]).params)

    async def take_any(self, limit: int = 25, *, longer: int | None = None) -> "TakenJob | None":
        """Take a free job of the first page, of the highest priority.

        Among equal priorities the order is random. All clients see the same page, and in page order
        most of them would request a job that another client has just taken.

        Args:
            limit: Jobs per page, up to 100: a few for each client that requests jobs concurrently.
            longer: See `take`.

        Returns:
            The job; None if there is no job, or other clients took the whole page.

        Raises:
            SetupError: `longer` is not valid, see `take`.
        """
        page = await self._load_page({"limit": str(limit)})
        jobs = [_parse_job(data) for data in page.json()["Result"]]
        random.shuffle(jobs)
        jobs.sort(key=lambda job: -job.priority)
        for job in jobs:
            if (taken_job := await self.take(job, longer=longer)) is not None:
                return taken_job
        return None

    async def _load_page(self, query: Mapping[str, str]) -> httpx.Response:
        return await self.send("GET", "/queued-jobs", query=query)

    async def take(self, job: QueuedJob, *, longer: int | None = None) -> "TakenJob | None":
        """Take a job; return None if the job is not available.

        Another client may have the job, or the queue may be paused.

        Args:
            job: A job from `jobs`.
            longer: Seconds to add to the server's timeout.

        Raises:
            SetupError: `longer` is not a whole number, is negative, or exceeds ten years.
        """
        body: dict[str, Any] = {"NextState": "INFLIGHT"}
        if longer is not None:
            # Check here: a 400 of the server would look like an unavailable job.
            if type(longer) is not int or not 0 <= longer <= MAX_TIMEOUT:
                allowed = f"a whole number of seconds from 0 to {MAX_TIMEOUT}"
                raise SetupError(f"longer must be {allowed}, got {longer!r}")
            body["IncrementalTimeout"] = longer
        try:
            response = await self.send("POST", f"/job/{job.id}", body=body)
        except HttpError as error:
            if error.status in _UNAVAILABLE:
                return None
            raise
        # Success without a lease: the job was already in flight, usually taken by another client.
        lease = response.headers.get(_LEASE)
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
        """Send a request below the consumer's path, with the lease of `taken`.

        The lease proves that this client still has the job; without `taken` none is needed.
        """
        headers = self._tokens if taken is None else {**self._tokens, _LEASE: taken.lease}
        lease_lost = None if taken is None else taken.lease_lost_message
        url = self._base + path
        return await self.request(
            method, url, lost=lease_lost, json=body, params=query, headers=headers
        )


class TakenJob(LeasedItem):
    """A job that this client has taken.

    The normal end of its context manager settles the job as delivered. After an exception the job
    stays leased, and is queued again when the lease expires.

    Raises (from every method):
        LeaseLostError: the lease has expired, and another client may have the job; nothing was
            changed.
        HttpError, httpx.HTTPError: see `PullConsumer`.
    """

    def __init__(self, consumer: PullConsumer, job: QueuedJob, lease: str) -> None:
        super().__init__()
        self.job = job
        self.lease = lease
        self._consumer = consumer

    @property
    def lease_lost_message(self) -> str:
        """Error message for a lost lease."""
        return (
            f"lease lost: another client may have job {self.job.id}, so nothing was changed; take "
            "it with longer=, or call heartbeat() earlier"
        )

    async def delivered(self) -> None:
        """Settle the job as done."""
        await self._settle("DELIVERED")

    async def dead(self) -> None:
        """Settle the job as failed, without an automatic retry."""
        await self._settle("DEAD")

    async def heartbeat(self, longer: int = 0) -> None:
        """Extend the lease to the server's timeout and `longer` seconds from now."""
        body = {"IncrementalTimeout": longer}
        await self._send(f"/job/{self.job.id}/heartbeat", body)

    async def _settle(self, state: str) -> None:
        """End the job with the server's `state`; the context manager then has nothing to do."""
        await self._send(f"/job/{self.job.id}", {"NextState": state})
        self._is_settled = True

    async def _send(self, path: str, body: Mapping[str, Any]) -> None:
        await self._consumer.send("POST", path, body=body, taken=self)

    async def _complete(self) -> None:
        await self.delivered()


def _parse_job(data: Mapping[str, Any]) -> QueuedJob:
    """Convert a job of the server's JSON; a binary payload is sent as base64.

    The suffix ";base64" of the content type marks such a payload.
    """
    message = data["Message"]
    content_type: str = message["ContentType"]
    payload = message["Payload"].encode()
    if content_type.endswith(_BASE64):
        content_type = content_type.removesuffix(_BASE64)
        payload = base64.b64decode(payload)
    return QueuedJob(data["ID"], data["Priority"], message["MessageID"], payload, content_type)
