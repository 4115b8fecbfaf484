"""Client of any queue over HTTP."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote

import httpx

from faststream_sqlbroker.client.transport import TIMEOUT, HttpClient, LeasedItem
from faststream_sqlbroker.core.times import Duration, parse_delay, parse_lease, parse_non_negative
from faststream_sqlbroker.exceptions import SetupError

_LEASE_LOST = (
    "lease lost: another client may have the message, so nothing was changed; reserve it with a "
    "longer lease, or call heartbeat() earlier"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHttpMessage:
    """A message to publish.

    Args:
        body: bytes and str unchanged, anything else as JSON.
        content_type: By default application/json, text/plain, or none for bytes.
        key: For policies and `ordered=True`.
        priority: -100 to 100; higher priorities are taken first.
        dedup_id: Unique in the queue while the message lives.
        delay: Time until the message is due: seconds, a timedelta or text like "1.5h".
        next_attempt_at: Due time, instead of `delay`; an aware datetime.
        expires_in: Time after which the message does not start, like `delay`.
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


class QueueClient(HttpClient):
    """A queue of the server, for another service.

    Raises (from every method):
        HttpError: the server refused, for example because of a wrong token.
        httpx.HTTPError: the server could not be reached, or took longer than 30 s.
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
        """Create a client; no request is sent yet.

        Args:
            url: URL of the mounted application, such as https://shop.example/broker.
            queue: The queue's full name.
            publish_token: Needed for `publish` and `publish_batch`.
            consume_token: Needed for `reserve` and the methods of `HttpMessage`.
            http: Client to use, which the caller closes; by default a client is created.
        """
        super().__init__(http)
        self.queue = queue
        # Encode all characters: a name may contain slashes and question marks.
        self._base = f"{url.rstrip('/')}/v1/queues/{quote(queue, safe='')}"
        self._publish_token = publish_token
        self._consume_token = consume_token

    async def publish(self, message: Any) -> int | None:
        """Publish a message.

        Args:
            message: A body, or a `NewHttpMessage`.

        Returns:
            The id; None if the queue already has a message with this dedup_id.
        """
        response = await self._send("/publish", _create_message_data(message), self._publish_token)
        message_id: int | None = response.json()["id"]
        return message_id

    async def publish_batch(self, *messages: Any) -> list[int | None]:
        """Publish 1 to 1,000 messages in a single transaction: all messages, or none.

        Returns:
            The ids in the order of the messages; None for a duplicate, see `publish`.
        """
        body = {"messages": [_create_message_data(message) for message in messages]}
        response = await self._send("/publish-batch", body, self._publish_token)
        message_ids: list[int | None] = response.json()["ids"]
        return message_ids

    async def reserve(
        self, limit: int = 1, *, lease: Duration = 60.0, wait: Duration = 0.0
    ) -> "list[HttpMessage]":
        """Lease the first due messages; return an empty list if no message becomes due.

        Args:
            limit: Maximum messages, 1 to 100; fewer than the due messages may be returned.
            lease: Length of the lease, by the database's clock.
            wait: Maximum wait for the first message, up to 30 seconds.

        Raises:
            SetupError: `lease` or `wait` is not a valid duration.
        """
        wait_seconds = parse_non_negative("wait", wait)
        body = {"limit": limit, "lease_seconds": parse_lease(lease), "wait": wait_seconds}
        response = await self._send("/reserve", body, self._consume_token, TIMEOUT + wait_seconds)
        return [HttpMessage(self, data) for data in response.json()["messages"]]

    async def end(self, message: "HttpMessage", how: str, body: Mapping[str, Any]) -> Any:
        """Send a request about a reserved message, for `HttpMessage`.

        The lease token proves to the server that this client still has the message. `how` is the
        operation: "heartbeat", "commit" or "rollback".

        Raises:
            LeaseLostError: another client has the lease; nothing was changed.
        """
        path = f"/messages/{message.id}/{how}"
        request_body = {"lease_token": message.lease_token, **body}
        return (await self._send(path, request_body, self._consume_token)).json()

    async def _send(
        self, path: str, body: Mapping[str, Any], token: str, timeout: float = TIMEOUT
    ) -> httpx.Response:
        """Send a POST request with the token of the publish or the consume side.

        The server answers 409 if the lease of a message is lost, which becomes LeaseLostError.
        """
        headers = {"Authorization": f"Bearer {token}"}
        # The server may wait before it responds, so the timeout must be longer.
        return await self.request(
            "POST", self._base + path, lost=_LEASE_LOST, json=body, headers=headers, timeout=timeout
        )


class HttpMessage(LeasedItem):
    """A message that this client has reserved.

    The normal end of its context manager commits the message, and an exception rolls it back,
    unless it was settled inside. The lease is not extended automatically.

    Attributes:
        id: Id of the message.
        queue: Queue of the message.
        payload: Stored body.
        content_type: Content type of the body, or None.
        headers: Headers by name.
        key: Key of the message.
        priority: -100 to 100.
        attempt: 1 for the first attempt.
        deliveries: Number of claims, including this one.
        lease_ends_at: End of the lease by the database's clock (aware, UTC).

    Raises (from every method):
        LeaseLostError: another client has the lease; nothing was changed.
        HttpError, httpx.HTTPError: see `QueueClient`.
    """

    def __init__(self, client: QueueClient, data: Mapping[str, Any]) -> None:
        """Create the message from the server's JSON, in which a binary body is base64."""
        super().__init__()
        self._client = client
        self.id: int = data["id"]
        self.queue: str = data["queue"]
        text: str = data["body"]
        is_bytes = data["encoding"] == "base64"
        self.payload = base64.b64decode(text) if is_bytes else text.encode()
        self.content_type: str | None = data["content_type"]
        self.headers: dict[str, Any] = data["headers"]
        self.key: str | None = data["key"]
        self.priority: int = data["priority"]
        self.attempt: int = data["attempt"]
        self.deliveries: int = data["deliveries"]
        self.lease_token: str = data["lease_token"]
        self.lease_ends_at = datetime.fromisoformat(data["lease_ends_at"])

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            ValueError: the body is not JSON.
        """
        return json.loads(self.payload)

    async def heartbeat(self, lease: Duration = 60.0) -> None:
        """Extend the lease to end `lease` from now; a lease is never shortened."""
        body = {"lease_seconds": parse_lease(lease)}
        response = await self._client.end(self, "heartbeat", body)
        self.lease_ends_at = datetime.fromisoformat(response["lease_ends_at"])

    async def commit(self, result: Any = None) -> None:
        """Settle the message as COMPLETED; a `result` replaces the body in the archive."""
        body = {} if result is None else {"result": _encode_body(result, None)}
        await self._settle("commit", body)

    async def rollback(self, delay: Duration | None = None, *, error: str | None = None) -> None:
        """Count a failed attempt, and retry after `delay`, or at the time that the server decides.

        Without a remaining attempt the message is settled as FAILED.
        """
        await self._settle("rollback", _remove_none(delay=_convert_to_seconds(delay), error=error))

    async def release(self) -> None:
        """Release the message as if never reserved, without counting a delivery."""
        await self._settle("rollback", {"outcome": "release"})

    async def give_up(
        self,
        outcome: Literal["fail", "discard"] = "fail",
        *,
        reason: str | None = None,
        error: str | None = None,
    ) -> None:
        """Settle the message as FAILED or DISCARDED, without a retry."""
        await self._settle("rollback", _remove_none(outcome=outcome, reason=reason, error=error))

    async def _settle(self, operation: str, body: Mapping[str, Any]) -> None:
        """Settle the message by the server's `operation`; only the first call may do so.

        The context manager then settles nothing at its end.
        """
        if self._is_settled:
            raise SetupError(f"message {self.id} is already settled: reserve another message")
        await self._client.end(self, operation, body)
        self._is_settled = True

    async def _complete(self) -> None:
        await self.commit()

    async def _fail(self, error: Exception) -> None:
        await self.rollback(error=f"{type(error).__name__}: {error}"[:1000])


def _convert_to_seconds(duration: Duration | None) -> float | None:
    return None if duration is None else parse_delay(duration)


def _create_message_data(message: Any) -> dict[str, Any]:
    """Return a message in the format of the server; a plain body counts as a message.

    Options that are not set are left out, so that the server's defaults apply.
    """
    # Most messages need no options, so a plain body is allowed.
    options = message if isinstance(message, NewHttpMessage) else NewHttpMessage(body=message)
    due_at = options.next_attempt_at
    return _encode_body(options.body, options.content_type) | _remove_none(
        key=options.key,
        # 0 is the server's default.
        priority=options.priority or None,
        dedup_id=options.dedup_id,
        delay=_convert_to_seconds(options.delay),
        next_attempt_at=None if due_at is None else due_at.timestamp(),
        expires_in=_convert_to_seconds(options.expires_in),
        headers=dict(options.headers) or None,
        correlation_id=options.correlation_id,
    )


def _encode_body(body: Any, content_type: str | None) -> dict[str, Any]:
    """Return the body in the server's format: base64, text, or JSON as it is.

    JSON has no bytes, and a text without `encoding` would be taken for a JSON string.
    """
    if isinstance(body, bytes):
        data = {"body": base64.b64encode(body).decode(), "encoding": "base64"}
    elif isinstance(body, str):
        data = {"body": body, "encoding": "text"}
    else:
        data = {"body": body}
    return data | _remove_none(content_type=content_type)


def _remove_none(**fields: Any) -> dict[str, Any]:
    """Return the fields that are set; the server's defaults apply to the others."""
    return {name: value for name, value in fields.items() if value is not None}
