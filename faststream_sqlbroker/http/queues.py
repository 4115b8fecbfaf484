"""Any queue over HTTP: publish, reserve, heartbeat, commit and rollback."""

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
from faststream_sqlbroker.core.checks import queue_problem
from faststream_sqlbroker.core.outcome import Ack, Discard, Nack, Outcome, Reject, Release
from faststream_sqlbroker.core.reasons import REJECTED
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.rows import NewMessage as Row
from faststream_sqlbroker.core.text import clean_text, short
from faststream_sqlbroker.core.times import delay_seconds
from faststream_sqlbroker.database.messages.direct_claim import Replaced
from faststream_sqlbroker.flow.tasks.queue_jobs import LeasedMessage, QueueJobs
from faststream_sqlbroker.http import models
from faststream_sqlbroker.http.answers import (
    FORM,
    Problem,
    StoredJson,
    kind_of,
    tellable,
    told_body,
)
from faststream_sqlbroker.http.api import (
    BODY,
    FORM_BODY,
    OPTIONAL,
    Api,
    Caller,
    Door,
    MessageId,
)
from faststream_sqlbroker.http.gate import Gate
from faststream_sqlbroker.parser import CONTENT_TYPE, REPLY_TO
from faststream_sqlbroker.publisher.rows import make_row

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="sqlbroker"'}
_BEARER = "bearer"
_CONTENT_TYPES = {"json": "application/json", "text": "text/plain", "base64": None}
_OPTIONS = ("key", "priority", "dedup_id", "delay", "next_attempt_at", "expires_in")


QueueName = Annotated[
    str,
    Path(description="The queue's name, as it is or encoded", json_schema_extra={"minLength": 1}),
]
TokenRole = Annotated[QueueRole, Path(description="What the token allows")]


class QueueRoutes:
    """Answers requests about queues."""

    def __init__(self, jobs: Callable[[], QueueJobs], gate: Gate) -> None:
        """Administrators pass by a door of theirs; others by a token of the queue."""
        self._current = jobs
        self._gate = gate

    @property
    def _jobs(self) -> QueueJobs:
        return self._current()

    def add_to(self, api: Api, admin: Door) -> None:
        """Serve all of them; `admin` lets administrators in.

        The names of queues may have slashes: what follows is never a part of them.
        """
        queue = "/v1/queues/{queue:path}"
        message = queue + "/messages/{message}"
        producers = Door(("queueToken",), partial(self._let_in, role="publish"))
        consumers = Door(("queueToken",), partial(self._let_in, role="consume"))
        leased = (*BODY, 404, 409)
        add = partial(api.add, part="queues")
        made = dict.fromkeys((200, 201), models.QueueToken)
        path = f"PUT {queue}/tokens/{{role}}"
        add(path, self.put_queue_token, admin, made, *FORM_BODY, 404, body=OPTIONAL)
        add(f"POST {message}/heartbeat", self.extend, consumers, {200: models.LeaseEnd}, *leased)
        add(f"POST {message}/commit", self.commit, consumers, {200: models.Settled}, *leased)
        add(f"POST {message}/rollback", self.rollback, consumers, {200: models.Settled}, *leased)
        batch = {201: models.PublishedBatch}
        add(f"POST {queue}/publish-batch", self.publish_batch, producers, batch, *BODY)
        published = dict.fromkeys((200, 201), models.Published)
        add(f"POST {queue}/publish", self.publish, producers, published, *BODY)
        add(f"POST {queue}/reserve", self.reserve, consumers, {200: models.Reserved}, *BODY)

    def end_waits(self) -> None:
        """Answer all that wait, so that a server can stop."""
        self._jobs.polls.end()

    # For administrators.

    async def put_queue_token(
        self,
        queue: QueueName,
        role: TokenRole,
        form: Annotated[models.Rotation, Body(media_type=FORM)],
        user: Caller,
    ) -> Response:
        """Make the token of a queue, or replace it. Only this answer shows the token."""
        await self._gate.begin(self._jobs, "tokens")
        _check_name(queue)
        found = await self._jobs.store.tokens.put_queue(
            queue, role, by=user.name, rotate=form.is_wanted
        )
        shown = {"queue": queue, "role": role}
        if found.new_token is not None:
            shown["token"] = found.new_token
        return JSONResponse(shown, 201 if found.created else 200)

    # For producers.

    async def publish(self, queue: QueueName, message: models.NewMessage) -> Response:
        """Publish a message."""
        [found] = await self._jobs.publish([_row(queue, message)])
        return JSONResponse({"id": found}, 200 if found is None else 201)

    async def publish_batch(self, queue: QueueName, batch: models.NewMessages) -> Response:
        """Publish messages in one transaction."""
        ids = await self._jobs.publish([_row(queue, each) for each in batch.messages])
        return JSONResponse({"ids": ids}, 201)

    # For consumers.

    async def reserve(self, request: Request, queue: QueueName, wanted: models.Reserve) -> Response:
        """Lease messages; wait for the first of them as long as the client stays."""
        rows = await self._while_connected(request, queue, wanted)
        shown = [_shown(row, wanted.lease_seconds) for row in rows]
        return StoredJson({"messages": shown})

    async def _while_connected(
        self, request: Request, queue: str, wanted: models.Reserve
    ) -> list[ClaimedMessage]:
        taking = asyncio.ensure_future(
            self._jobs.reserve(
                queue, limit=wanted.limit, lease=wanted.lease_seconds, wait=wanted.wait
            )
        )
        # Without a wait there is nothing that a client could leave.
        if wanted.wait <= 0:
            return await taking
        # The body is read: what comes next is the end of the connection.
        leaving = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((taking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not leaving.done():
                return await taking
            # It has got messages that no one will read.
            if taking.done():
                await self._jobs.give_back(queue, await taking)
            raise Problem(400, "the client has gone")
        finally:
            leaving.cancel()
            if not taking.done():
                taking.cancel()
                with suppress(asyncio.CancelledError):
                    await taking

    async def extend(
        self, queue: QueueName, message: MessageId, wanted: models.Heartbeat
    ) -> Response:
        """Extend the lease of a message."""
        leased = LeasedMessage(queue, message, UUID(wanted.lease_token))
        ends = await self._jobs.extend(leased, wanted.lease_seconds)
        if ends is None:
            raise _lost()
        return JSONResponse({"lease_ends_at": _time(ends)})

    async def commit(self, queue: QueueName, message: MessageId, wanted: models.Commit) -> Response:
        """Settle a message as COMPLETED."""
        replaced = None if wanted.result is None else _replacing(wanted.result)
        leased = LeasedMessage(queue, message, UUID(wanted.lease_token))
        return _settled(await self._jobs.settle(leased, Ack(), replaced=replaced))

    async def rollback(
        self, queue: QueueName, message: MessageId, wanted: models.Rollback
    ) -> Response:
        """Give a message back, or up."""
        leased = LeasedMessage(queue, message, UUID(wanted.lease_token))
        error = None if wanted.error is None else clean_text(wanted.error)
        return _settled(await self._jobs.settle(leased, _outcome(wanted), error=error))

    async def _let_in(self, request: Request, role: QueueRole) -> None:
        """Compare the token of the queue.

        Raises:
            Problem: the token is missing (401) or wrong (403), or it cannot be a queue (400).
        """
        await self._gate.begin(self._jobs, "tokens")
        queue = request.path_params["queue"]
        _check_name(queue)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip()

        if scheme.lower() != _BEARER or not token:
            raise Problem(
                401,
                f"there is no token: send that of the queue for {role}, as "
                "Authorization: Bearer TOKEN",
                _CHALLENGE,
            )
        look = partial(self._jobs.store.tokens.find_role, queue, role)
        # A queue has two tokens: what is held of one must not stand for the other.
        if await self._gate.let_in(request, f"{role} {queue}", [token], look) is None:
            raise Problem(
                403,
                f"the token does not allow to {role} here: an administrator makes one with "
                f"PUT /v1/queues/QUEUE/tokens/{role}",
            )


def _check_name(queue: str) -> None:
    if (problem := queue_problem(queue)) is not None:
        raise Problem(400, f"{short(queue)} cannot be the name of a queue: {problem}")


def _row(queue: str, message: models.NewMessage) -> Row:
    """The row to insert.

    Raises:
        Problem: the body is not what its encoding says.
        PublishError: a value cannot be stored.
    """
    if any(name.lower() == REPLY_TO for name in message.headers):
        # A handler's answer would go wherever the caller wants.
        raise Problem(400, f"the header {REPLY_TO} is not for clients over HTTP")
    payload, content_type = _encoded(message)
    options = {name: getattr(message, name) for name in _OPTIONS}
    return make_row(
        queue,
        payload,
        content_type,
        options,
        headers=message.headers,
        correlation_id=message.correlation_id,
    )


def _encoded(given: models.Body) -> tuple[bytes, str | None]:
    """The bytes of a body, and their content type."""
    content_type = given.content_type or _CONTENT_TYPES[given.encoding]
    body = given.body
    try:
        if given.encoding == "json":
            text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return text.encode(), content_type
        if not isinstance(body, str):
            told = kind_of(body)
            raise Problem(400, f"for the encoding {given.encoding} body must be text, got {told}")
        if given.encoding == "text":
            return body.encode(), content_type
        return base64.b64decode(body, validate=True), content_type
    except (ValueError, binascii.Error):
        wanted = {
            "json": "a JSON value without NaN, infinity and halves of surrogate pairs",
            "text": "text without halves of surrogate pairs",
            "base64": "base64 of RFC 4648, with its padding",
        }[given.encoding]
        text = f"for the encoding {given.encoding} body must be {wanted}, got {kind_of(body)}"
        raise Problem(400, text) from None


def _replacing(result: models.Body) -> Callable[[ClaimedMessage], Replaced]:
    payload, content_type = _encoded(result)

    def replaced(row: ClaimedMessage) -> Replaced:
        # As they are told: some databases store no others.
        others = {name: value for name, value in _headers(row).items() if name != CONTENT_TYPE}
        new = {**others, CONTENT_TYPE: content_type} if content_type else others
        return Replaced(payload, new)

    return replaced


def _outcome(wanted: models.Rollback) -> Outcome:
    """What the message ends in.

    Raises:
        Problem: a field does not belong to the outcome.
        SetupError: the delay is no duration.
    """
    fields = {
        "retry": {"delay", "error"},
        "release": set[str](),
        "fail": {"reason", "error"},
        "discard": {"reason", "error"},
    }[wanted.outcome]
    given = {name for name in ("delay", "reason", "error") if getattr(wanted, name) is not None}
    if wrong := sorted(given - fields):
        told = ", ".join(sorted(fields)) or "no other field"
        text = f"the outcome {wanted.outcome} takes {told}, got {', '.join(wrong)}: leave it out"
        raise Problem(400, text)
    reason = clean_text(wanted.reason or "") or REJECTED
    if wanted.outcome == "retry":
        return Nack(None if wanted.delay is None else delay_seconds(wanted.delay))
    if wanted.outcome == "release":
        return Release()
    if wanted.outcome == "fail":
        return Reject(reason)
    return Discard(reason)


def _settled(found: Settlement | None) -> Response:
    if found is None:
        raise _lost()
    state = "PENDING" if found.state is None else found.state.name
    return JSONResponse({"state": state})


def _lost() -> Problem:
    text = "the lease is lost, as another consumer may have the message: leave it, and reserve anew"
    return Problem(409, text)


def _shown(row: ClaimedMessage, lease: float) -> dict[str, Any]:
    # The text as it is, not the JSON value in it: large numbers would lose their digits.
    body, encoded = told_body(row.payload)
    kind = row.headers.get(CONTENT_TYPE)
    return {
        "id": row.id,
        "queue": row.queue,
        "body": body,
        "encoding": "base64" if encoded else "text",
        "content_type": kind if isinstance(kind, str) else None,
        "headers": _headers(row),
        "key": row.key,
        "priority": row.priority,
        "attempt": row.attempts_count + 1,
        "deliveries": row.deliveries_count,
        "created_at": _time(row.created_at),
        "lease_token": str(row.lease_token),
        "lease_ends_at": _time(row.acquired_at + timedelta(seconds=lease)),
    }


def _headers(row: ClaimedMessage) -> dict[str, Any]:
    """As JSON can tell them: another program may have stored NaN, or half of a surrogate pair."""
    headers = row.headers
    try:
        json.dumps(headers, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        # An answer that failed would leave all messages of it leased, each time anew.
        try:
            found: dict[str, Any] = tellable(headers)
        except (ValueError, RecursionError):
            return {}
        return found
    return headers


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
