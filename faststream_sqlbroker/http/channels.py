"""Channels and pull consumers over HTTP, in the manner of webhook-broker."""

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from faststream_sqlbroker.core.channels import (
    LONGEST_TIMEOUT,
    TRANSITIONS,
    JobState,
    PullJob,
    Registered,
    queue_of,
    step_to,
    token_fits,
)
from faststream_sqlbroker.core.stored import NotACursorError
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.database.pull import Changed
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from faststream_sqlbroker.http.answers import (
    BodyLimits,
    Problem,
    StoredJson,
    read_body,
    read_form,
    read_object,
)
from faststream_sqlbroker.http.gate import Gate
from faststream_sqlbroker.http.lockout import Look
from faststream_sqlbroker.http.parameters import Guard, flag, hash_of, row_id, whole
from faststream_sqlbroker.http.users import Role, User

CHANNEL_TOKEN = "X-Broker-Channel-Token"  # noqa: S105 - the name of a header
CONSUMER_TOKEN = "X-Broker-Consumer-Token"  # noqa: S105 - as above
LEASE = "X-Broker-Lease"
PRIORITY = "X-Broker-Message-Priority"
DEDUP_ID = "X-Broker-Dedup-Id"
BASE64 = ";base64"
"""The end of the content type of a payload that is base64."""
DEFAULT_LIMIT = 25
"""Jobs of a page."""
HIGHEST_LIMIT = 100
"""More are clipped to it."""
HIGHEST_PRIORITY = 100
"""Of a message; the lowest is as much below 0."""
WANTED = ("INFLIGHT", "DELIVERED", "DEAD")
"""The states that a request may name."""
LOST = "the lease is lost, as another consumer may have the job: leave it, and take another"
_CONTENT_TYPE = re.compile(r"[ -~]{1,200}")
_DEDUP_ID = re.compile(r"[!-~]([ -~]{0,253}[!-~])?")
_FIELDS = frozenset({"type", "rotate"})


class ChannelRoutes:
    """Answers requests about channels."""

    def __init__(
        self, jobs: Callable[[], PullJobs], gate: Gate, limits: BodyLimits, guard: Guard
    ) -> None:
        """Administrators pass by `guard`; consumers by both tokens."""
        self._current = jobs
        self._gate = gate
        self._limits = limits
        self._guard = guard

    @property
    def _jobs(self) -> PullJobs:
        return self._current()

    def routes(self) -> list[Route]:
        """All paths."""
        channel = "/channel/{channel}"
        consumer = channel + "/consumer/{consumer}"
        job = consumer + "/job/{job}"
        return [
            Route(channel, self._guard(Role.ADMIN, self.put_channel), methods=["PUT"]),
            Route(channel + "/broadcast", self.broadcast, methods=["POST"]),
            Route(consumer, self._guard(Role.ADMIN, self.put_consumer), methods=["PUT"]),
            Route(consumer + "/queued-jobs", self.queued_jobs, methods=["GET"]),
            Route(job, self.change, methods=["POST"]),
            Route(job, self.show, methods=["GET"]),
            Route(job + "/heartbeat", self.heartbeat, methods=["POST"]),
        ]

    async def _begin(self) -> None:
        try:
            await self._jobs.begin()
        except SetupError as error:
            # Its text names a worker, and the caller is not known yet.
            self._gate.log(f"HTTP: the channels of the configuration cannot be made: {error}")
            raise Problem(503, "the channels cannot be made: see the server's log") from None

    # For administrators.

    async def put_channel(self, request: Request, user: User) -> Response:
        """Make a channel; its token is told once."""
        await self._begin()
        fields = await self._fields(request)
        if "type" in fields:
            text = "a channel has no type: give it to PUT /channel/ID/consumer/ID"
            raise Problem(400, text)
        rotate = flag(fields, "rotate")
        channel = request.path_params["channel"]
        found = await self._jobs.put_channel(channel, by=user.name, rotate=rotate)
        return _registered(found, {"ID": found.id})

    async def put_consumer(self, request: Request, user: User) -> Response:
        """Make a consumer, or change its type; its token is told once."""
        await self._begin()
        fields = await self._fields(request)
        channel, consumer = _ids(request)
        found = await self._jobs.put_consumer(
            channel,
            consumer,
            kind=fields.get("type"),
            by=user.name,
            rotate=flag(fields, "rotate"),
        )
        if found is None:
            text = f"there is no channel {short(channel)}: make it with PUT /channel/ID"
            raise Problem(404, text)
        queue = queue_of(channel, found.id)
        return _registered(found, {"ID": found.id, "Type": found.type, "Queue": queue})

    async def _fields(self, request: Request) -> Mapping[str, str]:
        fields = await read_form(request, self._limits)
        if unknown := sorted(fields.keys() - _FIELDS):
            raise Problem(
                400,
                f"unknown fields: {', '.join(unknown)[:80]}; there are type and rotate. Tokens are "
                "made here, and no URLs are called",
            )
        return fields

    # For producers.

    async def broadcast(self, request: Request) -> Response:
        """Publish to all consumers of a channel."""
        await self._begin()
        channel = request.path_params["channel"]

        async def look() -> list[str]:
            return [hash_of(await self._jobs.find(channel))]

        name = f"channel {channel}"
        await self._check(request, name, look, CHANNEL_TOKEN)
        found = await self._jobs.find(channel)
        self._verify(request, name, [(found, CHANNEL_TOKEN)])
        priority = whole(request.headers.get(PRIORITY, "0"), PRIORITY)
        if not -HIGHEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
            raise Problem(400, f"{PRIORITY} must be -100 to 100, got {priority}")
        payload = await read_body(request, self._limits)
        kind = request.headers.get("content-type")
        if kind is not None and not _CONTENT_TYPE.fullmatch(kind):
            text = f"Content-Type must be up to 200 printable ASCII characters, got {short(kind)}"
            raise Problem(400, text)
        dedup_id = request.headers.get(DEDUP_ID)
        if dedup_id is not None and not _DEDUP_ID.fullmatch(dedup_id):
            text = f"{DEDUP_ID} must be 1 to 255 printable ASCII characters, got {short(dedup_id)}"
            raise Problem(400, text)
        sent = await self._jobs.broadcast(channel, payload, kind, priority, dedup_id)
        if not sent.consumers:
            text = (
                "the channel has no consumer, so nothing was published: make one with "
                "PUT /channel/ID/consumer/ID"
            )
            raise Problem(409, text)
        shown = {"MessageID": sent.message_id if sent.jobs else None, "Jobs": sent.jobs}
        return JSONResponse(shown, 201 if sent.jobs else 200)

    # For consumers.

    async def queued_jobs(self, request: Request) -> Response:
        """The jobs that may be taken, the highest priority first."""
        queue = await self._pull_queue(request)
        limit = whole(request.query_params.get("limit") or str(DEFAULT_LIMIT), "limit")
        if limit < 1:
            raise Problem(400, f"limit must be 1 or more, got {limit}")
        limit = min(limit, HIGHEST_LIMIT)
        after = request.query_params.get("after")
        try:
            jobs, following = await self._jobs.queued(queue, after, limit)
        except NotACursorError:
            raise Problem(
                400,
                f"after must be that of a page's Link header, got {short(after)}: begin without it",
            ) from None
        headers = {}
        if following is not None:
            query = urlencode({"limit": limit, "after": following})
            headers["Link"] = f'<{request.url.path}?{query}>; rel="next"'
        result = [_shown(job) for job in jobs]
        return StoredJson({"Result": result}, headers=headers)

    async def show(self, request: Request) -> Response:
        """One job, with its state."""
        queue = await self._pull_queue(request)
        job = await self._jobs.job(queue, row_id(request, "job"))
        if job is None:
            raise _no_job(request)
        return StoredJson({**_shown(job), "State": job.state.value, "RetryCount": job.retries})

    async def change(self, request: Request) -> Response:
        """Take a job, or end it."""
        queue = await self._pull_queue(request)
        job_id = row_id(request, "job")
        body = await read_object(request, self._limits, ("NextState", "IncrementalTimeout"))
        wanted = body.get("NextState")
        if not isinstance(wanted, str) or wanted not in WANTED:
            given = short(wanted) if "NextState" in body else "no NextState"
            raise Problem(400, f"NextState must be one of {', '.join(WANTED)}, got {given}")
        longer = _timeout(body, "IncrementalTimeout")
        changed = await self._jobs.change(
            queue, job_id, JobState(wanted), longer=longer, token=_lease(request)
        )
        return _answer(request, changed, JobState(wanted), with_timeout=longer is not None)

    async def heartbeat(self, request: Request) -> Response:
        """Extend the lease of a job that takes long."""
        queue = await self._pull_queue(request)
        job_id = row_id(request, "job")
        token = _lease(request)
        if token is None:
            raise Problem(400, f"there is no {LEASE}: send what the claim has answered as such")
        body = await read_object(request, self._limits, ("IncrementalTimeout",))
        longer = _timeout(body, "IncrementalTimeout") or 0
        held = await self._jobs.extend(queue, job_id, token, longer=longer)
        if not held:
            raise Problem(409, LOST)
        return Response(status_code=202)

    async def _pull_queue(self, request: Request) -> str:
        """The queue of a pull consumer whose tokens the request has.

        Raises:
            Problem: they are missing or wrong (403), or it is a push consumer (400).
        """
        await self._begin()
        channel, consumer = _ids(request)
        queue = queue_of(channel, consumer)

        async def look() -> list[str]:
            return [hash_of(each) for each in await self._jobs.both(channel, consumer)]

        name = f"consumer {queue}"
        await self._check(request, name, look, CHANNEL_TOKEN, CONSUMER_TOKEN)
        of_channel, of_consumer = await self._jobs.both(channel, consumer)
        self._verify(request, name, [(of_channel, CHANNEL_TOKEN), (of_consumer, CONSUMER_TOKEN)])
        assert of_consumer is not None  # noqa: S101 - its token was right
        if of_consumer.type != "pull":
            raise _push(queue)
        return queue

    async def _check(self, request: Request, name: str, look: Look, *headers: str) -> None:
        tokens = [request.headers.get(header, "") for header in headers]
        await self._gate.check_tokens(request, name, tokens, look)

    def _verify(
        self, request: Request, name: str, needed: list[tuple[Registered | None, str]]
    ) -> None:
        """Compare all tokens, also of what does not exist: the answer does not tell which."""
        tokens = [request.headers.get(header, "") for _, header in needed]
        fits = [
            token_fits(token, hash_of(found))
            for token, (found, _) in zip(tokens, needed, strict=True)
        ]
        self._gate.tokens_compared(request, name, tokens, right=all(fits))
        if all(fits):
            return
        names = " and ".join(header for _, header in needed)
        raise Problem(
            403,
            f"{names} must be right: send what PUT has answered when it was made, or let an "
            "administrator make another with rotate=true",
        )


def _answer(
    request: Request, changed: Changed, wanted: JobState, *, with_timeout: bool
) -> Response:
    """What a consumer is told of a change."""
    if changed.verdict == "not_found":
        raise _no_job(request)
    if changed.verdict == "push":
        raise _push(queue_of(*_ids(request)))
    if changed.verdict == "refused":
        raise Problem(400, _refusal(changed, wanted, with_timeout))
    refused = {
        "lost": (409, LOST),
        "paused": (409, "the queue is paused by an operator: ask again when it is resumed"),
        "expired": (400, "the job has expired before it was taken, and is dead: take another"),
    }
    if changed.verdict in refused:
        raise Problem(*refused[changed.verdict])
    headers = {}
    if changed.lease is not None:
        headers[LEASE] = str(changed.lease)
    return Response(status_code=202, headers=headers)


def _refusal(changed: Changed, wanted: JobState, with_timeout: bool) -> str:
    """Why a job cannot change, and what it can become."""
    state = changed.state
    assert state is not None  # noqa: S101 - it was found
    if with_timeout and step_to(state, wanted, with_timeout=True) is None:
        text = "IncrementalTimeout is only for a job that is QUEUED or DEAD and becomes INFLIGHT"
        return f"{text}, got it for {state.value} to {wanted.value}: leave it out"
    if (state, wanted) in TRANSITIONS:
        return "the job is not due yet: queued-jobs lists those that may be taken"
    ways = " or ".join(to.value for came, to in TRANSITIONS if came is state)
    able = f"can become {ways} only" if ways else "is done, and stays so"
    return f"a job that is {state.value} {able}, got NextState {wanted.value}"


def _push(queue: str) -> Problem:
    text = (
        f"the consumer is a push one: subscribe to the queue {queue!r}, or let an administrator "
        "make it a pull one by PUT with type=pull"
    )
    return Problem(400, text)


def _no_job(request: Request) -> Problem:
    """It may be another consumer's, which is not told."""
    given = short(request.path_params["job"])
    text = "retention may have removed it; queued-jobs lists those that may be taken"
    return Problem(404, f"this consumer has no job {given}: {text}")


def _registered(found: Registered, shown: dict[str, Any]) -> Response:
    if found.new_token is not None:
        shown["Token"] = found.new_token
    return JSONResponse(shown, 201 if found.created else 200)


def _shown(job: PullJob) -> dict[str, Any]:
    kind = job.headers.get("content-type")
    content_type = kind if isinstance(kind, str) else "application/octet-stream"
    try:
        payload = job.payload.decode()
    except UnicodeDecodeError:
        encoded = True
    else:
        # A producer may have given a type that ends like that: then it must be true.
        encoded = content_type.endswith(BASE64)
    if encoded:
        payload = base64.b64encode(job.payload).decode()
        content_type += BASE64
    message = {"MessageID": job.message_id, "Payload": payload, "ContentType": content_type}
    return {"ID": str(job.id), "Priority": job.priority, "Message": message}


def _ids(request: Request) -> tuple[str, str]:
    return request.path_params["channel"], request.path_params["consumer"]


def _timeout(body: Mapping[str, Any], name: str) -> int | None:
    """Seconds; None: the field is missing."""
    if name not in body:
        return None
    value = body[name]
    if type(value) is not int or not 0 <= value <= LONGEST_TIMEOUT:
        allowed = f"a whole number of seconds, 0 to {LONGEST_TIMEOUT}"
        raise Problem(400, f"{name} must be {allowed}, got {short(value)}")
    return value


def _lease(request: Request) -> UUID | None:
    """The lease that the consumer believes to have; None: it does not say."""
    given = request.headers.get(LEASE)
    if given is None:
        return None
    try:
        return UUID(given)
    except ValueError:
        text = f"{LEASE} must be the UUID that the claim has answered, got another text"
        raise Problem(400, text) from None
