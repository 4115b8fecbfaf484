"""A client of any queue over HTTP."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote

import httpx

from faststream_sqlbroker.client.answers import TIMEOUT, HeldOverHttp, HttpUser
from faststream_sqlbroker.core.times import (
    Duration,
    delay_seconds,
    lease_seconds,
    seconds_or_zero,
)
from faststream_sqlbroker.exceptions import SetupError

_LOST = (
    "lease lost: the message may have another client, so nothing was changed; reserve it with a "
    "longer lease, or call heartbeat() in time"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHttpMessage:
    """A message to publish.

    Args:
        body: bytes and str unchanged, anything else as JSON.
        content_type: None: application/json, text/plain, and none for bytes.
        key: For policies and `ordered=True`.
        priority: -100 to 100; higher ones are taken first.
        dedup_id: Unique in the queue while the message lives.
        delay: Time until it is due: seconds, a timedelta or text like "1.5h".
        next_attempt_at: When it is due, in place of `delay`; an aware datetime.
        expires_in: Time after which it does not start, as `delay`.
        headers: JSON values by name.
        correlation_id: Stored as a header.
    """

    body: Any
    content_type: str | None = None
    key: str | None = None
    priority: int = 0
    dedup_id: str | None = None
    delay: Duration | None = None
    next_attempt_at: datetime | None = None
    expires_in: Duration | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    correlation_id: str | None = None


class QueueClient(HttpUser):
    """A queue of the server, as another service sees it.

    Raises (from every method):
        HttpError: the server refused, such as a wrong token.
        httpx.HTTPError: it could not be reached, or took longer than 30 s.
    """

    def __init__(
        self,
        url: str,
        *,
        queue: str,
        publish_token: str = "",
        consume_token: str = "",
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: Where the application is mounted, as https://shop.example/broker.
            queue: The queue's full name.
            publish_token: Needed for `publish` and `publish_batch`.
            consume_token: Needed for `reserve`, and for what follows it.
            http: A client to use, which its caller closes; None makes one.
        """
        super().__init__(http)
        self.queue = queue
        # Encoded whole: a name may have slashes and question marks.
        self._base = f"{url.rstrip('/')}/v1/queues/{quote(queue, safe='')}"
        self._publish_token = publish_token
        self._consume_token = consume_token

    async def publish(self, message: Any) -> int | None:
        """Publish one message.

        Args:
            message: A body, or a `NewHttpMessage`.

        Returns:
            Its id; None if the queue has a message with its dedup_id already.
        """
        answer = await self._send("/publish", _sent(message), self._publish_token)
        found: int | None = answer.json()["id"]
        return found

    async def publish_batch(self, *messages: Any) -> list[int | None]:
        """Publish 1 to 1,000 messages in one transaction: all of them, or none.

        Returns:
            The ids in the order of the messages, None as of `publish`.
        """
        body = {"messages": [_sent(each) for each in messages]}
        answer = await self._send("/publish-batch", body, self._publish_token)
        found: list[int | None] = answer.json()["ids"]
        return found

    async def reserve(
        self, limit: int = 1, *, lease: Duration = 60.0, wait: Duration = 0.0
    ) -> "list[HttpMessage]":
        """Lease the first due messages; none if none becomes due.

        Args:
            limit: Messages at most, 1 to 100; there may be fewer than are due.
            lease: How long they are yours, by the database's clock.
            wait: How long to wait for the first one, up to 30 seconds.

        Raises:
            SetupError: `lease` or `wait` is no valid duration.
        """
        waited = seconds_or_zero("wait", wait)
        body = {"limit": limit, "lease_seconds": lease_seconds(lease), "wait": waited}
        answer = await self._send("/reserve", body, self._consume_token, TIMEOUT + waited)
        return [HttpMessage(self, each) for each in answer.json()["messages"]]

    async def end(self, message: "HttpMessage", how: str, body: Mapping[str, Any]) -> Any:
        """A request about a message that was reserved; used by `HttpMessage`.

        Raises:
            LeaseLostError: the lease is another client's; nothing was changed.
        """
        path = f"/messages/{message.id}/{how}"
        told = {"lease_token": message.lease_token, **body}
        return (await self._send(path, told, self._consume_token)).json()

    async def _send(
        self, path: str, body: Mapping[str, Any], token: str, timeout: float = TIMEOUT
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        # The server waits before it answers, so this must not give up sooner.
        return await self.request(
            "POST", self._base + path, lost=_LOST, json=body, headers=headers, timeout=timeout
        )


class HttpMessage(HeldOverHttp):
    """A message that this client has reserved.

    Used as a context manager, it is committed at a normal end and rolled back on an exception,
    unless it was settled inside. The lease is not extended automatically.

    Attributes:
        id: Its id.
        queue: Its queue.
        payload: The body as it is stored.
        content_type: Of the body; None: it has none.
        headers: By name.
        key: The key it was published with.
        priority: -100 to 100.
        attempt: 1 for the first attempt.
        deliveries: Times it was taken, this one included.
        lease_ends_at: By the database's clock (aware, UTC).

    Raises (from every method):
        LeaseLostError: the lease is another client's; nothing was changed.
        HttpError, httpx.HTTPError: as `QueueClient`.
    """

    def __init__(self, client: QueueClient, shown: Mapping[str, Any]) -> None:
        super().__init__()
        self._client = client
        self.id: int = shown["id"]
        self.queue: str = shown["queue"]
        text: str = shown["body"]
        is_bytes = shown["encoding"] == "base64"
        self.payload = base64.b64decode(text) if is_bytes else text.encode()
        self.content_type: str | None = shown["content_type"]
        self.headers: dict[str, Any] = shown["headers"]
        self.key: str | None = shown["key"]
        self.priority: int = shown["priority"]
        self.attempt: int = shown["attempt"]
        self.deliveries: int = shown["deliveries"]
        self.lease_token: str = shown["lease_token"]
        self.lease_ends_at = datetime.fromisoformat(shown["lease_ends_at"])

    def json(self) -> Any:
        """The body, read as JSON.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.payload)

    async def heartbeat(self, lease: Duration = 60.0) -> None:
        """Let the lease end `lease` from now, never sooner than it does."""
        body = {"lease_seconds": lease_seconds(lease)}
        answer = await self._client.end(self, "heartbeat", body)
        self.lease_ends_at = datetime.fromisoformat(answer["lease_ends_at"])

    async def commit(self, result: Any = None) -> None:
        """Settle it as COMPLETED; a `result` replaces the body in the archive."""
        body = {} if result is None else {"result": _encoded(result, None)}
        await self._end("commit", body)

    async def rollback(self, delay: Duration | None = None, *, error: str | None = None) -> None:
        """Count a failed attempt; it is due again after `delay`, or when the server says, or FAILED
        if no attempt is left.
        """
        await self._end("rollback", _given(delay=_seconds(delay), error=error))

    async def release(self) -> None:
        """Give it back as if it had not been reserved."""
        await self._end("rollback", {"outcome": "release"})

    async def give_up(
        self,
        outcome: Literal["fail", "discard"] = "fail",
        *,
        reason: str | None = None,
        error: str | None = None,
    ) -> None:
        """Settle it as FAILED or DISCARDED: it is not tried again."""
        await self._end("rollback", _given(outcome=outcome, reason=reason, error=error))

    async def _end(self, how: str, body: Mapping[str, Any]) -> None:
        if self._ended:
            raise SetupError(f"message {self.id} is settled already: reserve another one")
        await self._client.end(self, how, body)
        self._ended = True

    async def _finish(self) -> None:
        await self.commit()

    async def _fail(self, error: Exception) -> None:
        await self.rollback(error=f"{type(error).__name__}: {error}"[:1000])


def _seconds(length: Duration | None) -> float | None:
    return None if length is None else delay_seconds(length)


def _sent(message: Any) -> dict[str, Any]:
    """A message as the server reads it."""
    # A body needs no options mostly, so it may be given alone.
    new = message if isinstance(message, NewHttpMessage) else NewHttpMessage(body=message)
    due = new.next_attempt_at
    return _encoded(new.body, new.content_type) | _given(
        key=new.key,
        # 0 is what the server takes for none.
        priority=new.priority or None,
        dedup_id=new.dedup_id,
        delay=_seconds(new.delay),
        next_attempt_at=None if due is None else due.timestamp(),
        expires_in=_seconds(new.expires_in),
        headers=dict(new.headers) or None,
        correlation_id=new.correlation_id,
    )


def _encoded(body: Any, content_type: str | None) -> dict[str, Any]:
    if isinstance(body, bytes):
        shown = {"body": base64.b64encode(body).decode(), "encoding": "base64"}
    elif isinstance(body, str):
        shown = {"body": body, "encoding": "text"}
    else:
        shown = {"body": body}
    return shown | _given(content_type=content_type)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
