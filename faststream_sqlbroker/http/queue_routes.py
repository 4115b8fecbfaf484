"""Queues over HTTP: publish, reserve, heartbeat, commit and rollback."""

import asyncio
import base64
import binascii
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from fastapi import Body, Path
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.core.channels import QueueRole
from faststream_sqlbroker.core.checks import find_queue_error
from faststream_sqlbroker.core.outcome import Ack, Discard, Nack, Outcome, Reject, Release
from faststream_sqlbroker.core.reasons import REJECTED
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.rows import NewMessage as Row
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import clean_text, format_value
from faststream_sqlbroker.core.times import parse_delay
from faststream_sqlbroker.database.messages.single_claim import Replacement
from faststream_sqlbroker.flow.tasks.queue_jobs import LeasedMessage, RemoteConsumer
from faststream_sqlbroker.http import models
from faststream_sqlbroker.http.api import (
    BODY_ERRORS,
    FORM_ERRORS,
    OPTIONAL_BODY,
    AccessRule,
    Api,
    Caller,
    MessageId,
)
from faststream_sqlbroker.http.gate import AccessControl
from faststream_sqlbroker.http.responses import (
    FORM,
    Problem,
    StoredJsonResponse,
    describe_kind,
    encode_body,
    to_valid_json,
)
from faststream_sqlbroker.parser import CONTENT_TYPE, REPLY_TO
from faststream_sqlbroker.publisher.rows import make_row

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="sqlbroker"'}
_BEARER = "bearer"
_CONTENT_TYPES = {"json": "application/json", "text": "text/plain", "base64": None}
_PUBLISH_OPTIONS = ("key", "priority", "dedup_id", "delay", "next_attempt_at", "expires_in")


QueueName = Annotated[
    str,
    Path(
        description="Name of the queue, plain or percent-encoded",
        json_schema_extra={"minLength": 1},
    ),
]
TokenRole = Annotated[QueueRole, Path(description="Permission of the token")]


class QueueRoutes:
    """Handles requests about queues."""

    def __init__(
        self, get_jobs: Callable[[], RemoteConsumer], access_control: AccessControl
    ) -> None:
        """Serve queues; clients authenticate by a token of the queue."""
        self._get_jobs = get_jobs
        self._access_control = access_control

    @property
    def _jobs(self) -> RemoteConsumer:
        return self._get_jobs()

    def add_to(self, api: Api, admin: AccessRule) -> None:
        """Add all routes; `admin` admits administrators.

        Routes are matched in order: a queue name may contain slashes, and the rest of the path is
        never part of the name.
        """
        queue = "/v1/queues/{queue:path}"
        message = queue + "/messages/{message}"
        producers = AccessRule(("queueToken",), partial(self._check_token, role="publish"))
        consumers = AccessRule(("queueToken",), partial(self._check_token, role="consume"))
        lease_errors = (*BODY_ERRORS, 404, 409)
        add = partial(api.add, part="queues")
        token_responses = dict.fromkeys((200, 201), models.QueueToken)
        path = f"PUT {queue}/tokens/{{role}}"
        add(
            path,
            self.put_queue_token,
            admin,
            token_responses,
            *FORM_ERRORS,
            404,
            body=OPTIONAL_BODY,
        )
        add(
            f"POST {message}/heartbeat",
            self.extend,
            consumers,
            {200: models.LeaseEnd},
            *lease_errors,
        )
        add(f"POST {message}/commit", self.commit, consumers, {200: models.Settled}, *lease_errors)
        add(
            f"POST {message}/rollback",
            self.rollback,
            consumers,
            {200: models.Settled},
            *lease_errors,
        )
        batch = {201: models.PublishedBatch}
        add(f"POST {queue}/publish-batch", self.publish_batch, producers, batch, *BODY_ERRORS)
        responses = dict.fromkeys((200, 201), models.PublishResult)
        add(f"POST {queue}/publish", self.publish, producers, responses, *BODY_ERRORS)
        add(f"POST {queue}/reserve", self.reserve, consumers, {200: models.Reserved}, *BODY_ERRORS)

    def end_waits(self) -> None:
        """Answer all waiting requests, so that a server can stop."""
        self._jobs.long_polls.end()

    # For administrators.

    async def put_queue_token(
        self,
        queue: QueueName,
        role: TokenRole,
        form: Annotated[models.Rotation, Body(media_type=FORM)],
        user: Caller,
    ) -> Response:
        """Create or rotate the token of a queue. Only this response shows the token."""
        await self._access_control.create_configured(self._jobs, "tokens")
        _check_queue_name(queue)
        registered = await self._jobs.store.tokens.set_queue_token(
            queue, role, by=user.name, rotate=form.is_requested
        )
        content = {"queue": queue, "role": role}
        if registered.new_token is not None:
            content["token"] = registered.new_token
        return JSONResponse(content, 201 if registered.created else 200)

    # For producers.

    async def publish(self, queue: QueueName, message: models.PublishRequest) -> Response:
        """Publish a message."""
        [message_id] = await self._jobs.publish([_create_row(queue, message)])
        return JSONResponse({"id": message_id}, 200 if message_id is None else 201)

    async def publish_batch(self, queue: QueueName, batch: models.NewMessages) -> Response:
        """Publish messages in one transaction."""
        ids = await self._jobs.publish([_create_row(queue, message) for message in batch.messages])
        return JSONResponse({"ids": ids}, 201)

    # For consumers.

    async def reserve(self, request: Request, queue: QueueName, body: models.Reserve) -> Response:
        """Lease messages; wait for the first while the client is connected."""
        rows = await self._claim_while_connected(request, queue, body)
        messages = [_to_message_json(row, body.lease_seconds) for row in rows]
        return StoredJsonResponse({"messages": messages})

    async def _claim_while_connected(
        self, request: Request, queue: str, body: models.Reserve
    ) -> list[ClaimedMessage]:
        """Claim messages, and stop the wait when the client disconnects.

        Called by `reserve`, a long poll: the response waits for a message. Messages claimed for a
        client that has left are released immediately; otherwise they would stay leased until their
        leases expire.

        Raises:
            Problem: the client has disconnected (400).
        """
        claim_task = asyncio.ensure_future(
            self._jobs.reserve(queue, limit=body.limit, lease=body.lease_seconds, wait=body.wait)
        )
        # Without a wait the client has no time to disconnect.
        if body.wait <= 0:
            return await claim_task
        # The body was read, so the next event is the end of the connection.
        disconnect_task = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((claim_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
            if not disconnect_task.done():
                return await claim_task
            # Release the claimed messages, because no client will read them.
            if claim_task.done():
                await self._jobs.release(queue, await claim_task)
            raise Problem(400, "the client has disconnected")
        finally:
            disconnect_task.cancel()
            if not claim_task.done():
                claim_task.cancel()
                with suppress(asyncio.CancelledError):
                    await claim_task

    async def extend(
        self, queue: QueueName, message: MessageId, body: models.HeartbeatRequest
    ) -> Response:
        """Extend the lease of a message."""
        lease = LeasedMessage(queue, message, UUID(body.lease_token))
        ends_at = await self._jobs.extend(lease, body.lease_seconds)
        if ends_at is None:
            raise _create_lost_problem()
        return JSONResponse({"lease_ends_at": _format_time(ends_at)})

    async def commit(self, queue: QueueName, message: MessageId, body: models.Commit) -> Response:
        """Settle a message as COMPLETED."""
        replacement = None if body.result is None else _create_replacement(body.result)
        lease = LeasedMessage(queue, message, UUID(body.lease_token))
        return _create_settled_response(await self._jobs.settle(lease, Ack(), replaced=replacement))

    async def rollback(
        self, queue: QueueName, message: MessageId, body: models.Rollback
    ) -> Response:
        """Release a message for another attempt, or end it."""
        lease = LeasedMessage(queue, message, UUID(body.lease_token))
        error = None if body.error is None else clean_text(body.error)
        return _create_settled_response(
            await self._jobs.settle(lease, _parse_outcome(body), error=error)
        )

    async def _check_token(self, request: Request, role: QueueRole) -> None:
        """Check the token of the queue, which a client sends as a Bearer token.

        A queue has a token for publishing and another for consuming.

        Raises:
            Problem: the token is missing (401) or wrong (403), or the name is not valid (400).
        """
        await self._access_control.create_configured(self._jobs, "tokens")
        queue = request.path_params["queue"]
        _check_queue_name(queue)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip()

        if scheme.lower() != _BEARER or not token:
            raise Problem(
                401,
                f"the request has no token: send the queue's {role} token as "
                "Authorization: Bearer TOKEN",
                _CHALLENGE,
            )
        lookup = partial(self._jobs.store.tokens.find_role, queue, role)
        # A queue has two tokens: a verified token must not be accepted for the other role.
        if (
            await self._access_control.find_by_tokens(request, f"{role} {queue}", [token], lookup)
            is None
        ):
            raise Problem(
                403,
                f"the token does not have the role {role} here: ask an administrator to create one "
                f"with PUT /v1/queues/QUEUE/tokens/{role}",
            )


def _check_queue_name(queue: str) -> None:
    if (issue := find_queue_error(queue)) is not None:
        raise Problem(400, f"{format_value(queue)} cannot be the name of a queue: {issue}")


def _create_row(queue: str, message: models.PublishRequest) -> Row:
    """Create the row to insert for a message that an HTTP client publishes.

    Raises:
        Problem: the body does not have its encoding.
        PublishError: a value cannot be stored.
    """
    if any(name.lower() == REPLY_TO for name in message.headers):
        # Otherwise the caller could send a handler's reply to any queue.
        raise Problem(400, f"HTTP clients must not send the header {REPLY_TO}: remove it")
    payload, content_type = _encode_body(message)
    options = {name: getattr(message, name) for name in _PUBLISH_OPTIONS}
    return make_row(
        queue,
        payload,
        content_type,
        options,
        headers=message.headers,
        correlation_id=message.correlation_id,
    )


def _encode_body(model: models.Body) -> tuple[bytes, str | None]:
    """Return the bytes of a body to store, and their content type.

    Raises:
        Problem: the body does not fit its encoding (400).
    """
    content_type = model.content_type or _CONTENT_TYPES[model.encoding]
    body = model.body
    try:
        if model.encoding == "json":
            text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return text.encode(), content_type
        if not isinstance(body, str):
            kind = describe_kind(body)
            raise Problem(400, f"for the encoding {model.encoding} body must be text, got {kind}")
        if model.encoding == "text":
            return body.encode(), content_type
        return base64.b64decode(body, validate=True), content_type
    except (ValueError, binascii.Error):
        requirement = {
            "json": "a JSON value without NaN, infinity and lone surrogates",
            "text": "text without lone surrogates",
            "base64": "base64 of RFC 4648, with padding",
        }[model.encoding]
        kind = describe_kind(body)
        text = f"for the encoding {model.encoding} body must be {requirement}, got {kind}"
        raise Problem(400, text) from None


def _create_replacement(result: models.Body) -> Callable[[ClaimedMessage], Replacement]:
    """Return a function that replaces the body of a committed message in the archive.

    The client sent `result`, the result of its work. The headers are only known when the row is
    locked, so the caller gets a function. The content type of the old body is dropped.
    """
    payload, content_type = _encode_body(result)

    def replace_body(row: ClaimedMessage) -> Replacement:
        # Valid JSON, because some databases store nothing else.
        other_headers = {
            name: value for name, value in _get_json_headers(row).items() if name != CONTENT_TYPE
        }
        headers = {**other_headers, CONTENT_TYPE: content_type} if content_type else other_headers
        return Replacement(payload, headers)

    return replace_body


def _parse_outcome(body: models.Rollback) -> Outcome:
    """Return the outcome that a client has requested by a rollback.

    Each outcome accepts only some of the fields.

    Raises:
        Problem: a field does not belong to the outcome.
        SetupError: the delay is not a duration.
    """
    allowed = {
        "retry": {"delay", "error"},
        "release": set[str](),
        "fail": {"reason", "error"},
        "discard": {"reason", "error"},
    }[body.outcome]
    field_names = {name for name in ("delay", "reason", "error") if getattr(body, name) is not None}
    if unexpected := sorted(field_names - allowed):
        allowed_names = ", ".join(sorted(allowed)) or "no other field"
        received = ", ".join(unexpected)
        text = f"the outcome {body.outcome} accepts {allowed_names}, got {received}: omit it"
        raise Problem(400, text)
    reason = clean_text(body.reason or "") or REJECTED
    if body.outcome == "retry":
        return Nack(None if body.delay is None else parse_delay(body.delay))
    if body.outcome == "release":
        return Release()
    if body.outcome == "fail":
        return Reject(reason)
    return Discard(reason)


def _create_settled_response(state: MessageState | None) -> Response:
    """Return the new state of the message, or refuse the request if the lease was lost (None)."""
    if state is None:
        raise _create_lost_problem()
    return JSONResponse({"state": state.name})


def _create_lost_problem() -> Problem:
    text = "the lease is lost, another consumer may have the message: abandon it and reserve again"
    return Problem(409, text)


def _to_message_json(row: ClaimedMessage, lease: float) -> dict[str, Any]:
    """Convert a claimed row to the JSON of `ReservedMessage`; the lease starts with the claim."""
    # Keep JSON as text: large numbers would lose digits.
    body, is_base64 = encode_body(row.payload)
    content_type = row.headers.get(CONTENT_TYPE)
    return {
        "id": row.id,
        "queue": row.queue,
        "body": body,
        "encoding": "base64" if is_base64 else "text",
        "content_type": content_type if isinstance(content_type, str) else None,
        "headers": _get_json_headers(row),
        "key": row.key,
        "priority": row.priority,
        "attempt": row.attempts_count + 1,
        "deliveries": row.deliveries_count,
        "created_at": _format_time(row.created_at),
        "lease_token": str(row.lease_token),
        "lease_ends_at": _format_time(row.acquired_at + timedelta(seconds=lease)),
    }


def _get_json_headers(row: ClaimedMessage) -> dict[str, Any]:
    """Return the headers as valid JSON.

    Another program may have stored NaN, or half of a surrogate pair. Headers that cannot be
    repaired are dropped, so that the client gets the message at all.
    """
    headers = row.headers
    try:
        json.dumps(headers, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        # A response that failed would leave all its messages leased, on every request.
        try:
            valid_headers: dict[str, Any] = to_valid_json(headers)
        except (ValueError, RecursionError):
            return {}
        return valid_headers
    return headers


def _format_time(timestamp: datetime) -> str:
    return timestamp.isoformat().replace("+00:00", "Z")
