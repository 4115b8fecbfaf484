"""Channels and pull consumers over HTTP, in the manner of webhook-broker."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import Body, Header, Path, Query
from pydantic import BeforeValidator, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.core.channels import (
    TRANSITIONS,
    JobState,
    PullJob,
    Registered,
    is_allowed,
    queue_of,
)
from faststream_sqlbroker.core.stored import NotACursorError
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.database.pull import Changed
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from faststream_sqlbroker.http import channel_models as models
from faststream_sqlbroker.http.answers import (
    FORM,
    BodyLimits,
    Problem,
    StoredJson,
    read_body,
    told_body,
)
from faststream_sqlbroker.http.api import BODY, FORM_BODY, OPTIONAL, Api, Caller, Door, JobId, whole
from faststream_sqlbroker.http.gate import Gate
from faststream_sqlbroker.http.models import Rotation

CHANNEL_TOKEN = "X-Broker-Channel-Token"  # noqa: S105 - the name of a header
CONSUMER_TOKEN = "X-Broker-Consumer-Token"  # noqa: S105 - as above
LEASE = "X-Broker-Lease"
BASE64 = ";base64"
"""The end of the content type of a payload that is base64."""
DEFAULT_LIMIT = 25
"""Jobs of a page."""
HIGHEST_LIMIT = 100
"""More are clipped to it."""
LOST = "the lease is lost, as another consumer may have the job: leave it, and take another"
_CONTENT_TYPE = re.compile(r"[ -~]{1,200}")
# The pattern is that of the code, so that clients can check an id before they send it.
_ID = {"pattern": "^[A-Za-z0-9][A-Za-z0-9._~-]{0,99}$"}
ChannelId = Annotated[str, Path(description="The channel's id", json_schema_extra=_ID)]
ConsumerId = Annotated[str, Path(description="The consumer's id", json_schema_extra=_ID)]
Lease = Annotated[UUID, Header(alias=LEASE, description="What the claim has answered")]
OptionalLease = Annotated[
    UUID | SkipJsonSchema[None], Header(alias=LEASE, description="What the claim has answered")
]
Priority = Annotated[
    int,
    Field(ge=-100, le=100),
    BeforeValidator(whole),
    Header(alias="X-Broker-Message-Priority", description="Higher ones are taken first"),
]
DedupId = Annotated[
    Annotated[str, Field(pattern="^[!-~]([ -~]{0,253}[!-~])?$")] | SkipJsonSchema[None],
    Header(
        alias="X-Broker-Dedup-Id", description="A consumer that has a job with it gets no other"
    ),
]
Limit = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(lambda given: whole(given or DEFAULT_LIMIT)),
    Query(description=f"Jobs of a page; {HIGHEST_LIMIT} at most"),
]
After = Annotated[str | SkipJsonSchema[None], Query(description="Of the link to this page")]


class ChannelRoutes:
    """Answers requests about channels."""

    def __init__(self, jobs: Callable[[], PullJobs], gate: Gate, limits: BodyLimits) -> None:
        """Administrators pass by a door of theirs; consumers by both tokens."""
        self._current = jobs
        self._gate = gate
        self._limits = limits

    @property
    def _jobs(self) -> PullJobs:
        return self._current()

    def add_to(self, api: Api, admin: Door) -> None:
        """Serve all of them; `admin` lets administrators in."""
        channel = "/channel/{channel}"
        consumer = channel + "/consumer/{consumer}"
        job = consumer + "/job/{job}"
        both = (CHANNEL_TOKEN, CONSUMER_TOKEN)
        producers = Door(("channelToken",), partial(self._let_in, needed=both[:1]))
        consumers = Door(("channelToken", "consumerToken"), partial(self._let_in, needed=both))
        add = partial(api.add, part="channels")
        made = dict.fromkeys((200, 201), models.ChannelShown)
        add(f"PUT {channel}", self.put_channel, admin, made, *FORM_BODY, body=OPTIONAL)
        changed = dict.fromkeys((200, 201), models.ConsumerShown)
        add(f"PUT {consumer}", self.put_consumer, admin, changed, *FORM_BODY, 404, body=OPTIONAL)
        add(
            f"POST {channel}/broadcast",
            self.broadcast,
            producers,
            dict.fromkeys((200, 201), models.BroadcastShown),
            *(*BODY, 409),
            body={"content": {"*/*": {"schema": {}, "example": {"id": 1}}}},
        )
        add(
            f"GET {consumer}/queued-jobs",
            self.queued_jobs,
            consumers,
            {200: models.QueuedJobs},
            400,
            headers={"Link": "The next page, if there is one"},
        )
        add(f"GET {job}", self.job, consumers, {200: models.JobShown}, 400, 404)
        add(
            f"POST {job}",
            self.change_job,
            consumers,
            {202: models.JobChanged},
            *(*BODY, 404, 409),
            headers={LEASE: "Of a job that was taken: send it with what follows"},
        )
        add(f"POST {job}/heartbeat", self.extend_job, consumers, {202: None}, *BODY, 404, 409)

    # For administrators.

    async def put_channel(
        self, channel: ChannelId, form: Annotated[Rotation, Body(media_type=FORM)], user: Caller
    ) -> Response:
        """Make a channel, or give it a new token. Only this answer shows the token."""
        await self._gate.begin(self._jobs, "channels")
        found = await self._jobs.put(channel, by=user.name, rotate=form.is_wanted)
        assert found is not None  # noqa: S101 - only a consumer can be without its channel
        return _registered(found, {"ID": found.id})

    async def put_consumer(
        self,
        channel: ChannelId,
        consumer: ConsumerId,
        form: Annotated[models.ConsumerForm, Body(media_type=FORM)],
        user: Caller,
    ) -> Response:
        """Make a consumer, or change its type (default push). Only this answer shows its token."""
        await self._gate.begin(self._jobs, "channels")
        found = await self._jobs.put(
            channel, consumer, kind=form.type, by=user.name, rotate=form.is_wanted
        )
        if found is None:
            text = f"there is no channel {short(channel)}: make it with PUT /channel/ID"
            raise Problem(404, text)
        queue = queue_of(channel, found.id)
        return _registered(found, {"ID": found.id, "Type": found.type, "Queue": queue})

    # For producers.

    async def broadcast(
        self, request: Request, channel: ChannelId, priority: Priority = 0, dedup_id: DedupId = None
    ) -> Response:
        """Publish a job for each consumer of the channel."""
        payload = await read_body(request, self._limits)
        kind = request.headers.get("content-type")
        if kind is not None and not _CONTENT_TYPE.fullmatch(kind):
            text = f"Content-Type must be up to 200 printable ASCII characters, got {short(kind)}"
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

    async def queued_jobs(
        self,
        request: Request,
        channel: ChannelId,
        consumer: ConsumerId,
        limit: Limit = DEFAULT_LIMIT,
        after: After = None,
    ) -> Response:
        """The jobs that may be taken, the highest priority first."""
        limit = min(limit, HIGHEST_LIMIT)
        try:
            jobs, following = await self._jobs.queued(queue_of(channel, consumer), after, limit)
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

    async def job(self, channel: ChannelId, consumer: ConsumerId, job: JobId) -> Response:
        """One job with its state."""
        found = await self._jobs.job(queue_of(channel, consumer), job)
        if found is None:
            raise _no_job(job)
        return StoredJson(
            {**_shown(found), "State": found.state.value, "RetryCount": found.retries}
        )

    async def change_job(
        self,
        channel: ChannelId,
        consumer: ConsumerId,
        job: JobId,
        change: models.JobChange,
        lease: OptionalLease = None,
    ) -> Response:
        """Take a job, or end it."""
        queue = queue_of(channel, consumer)
        wanted = JobState(change.NextState)
        with_timeout = "IncrementalTimeout" in change.model_fields_set
        longer = change.IncrementalTimeout if with_timeout else None
        changed = await self._jobs.change(queue, job, wanted, longer=longer, token=lease)
        if changed.verdict == "not_found":
            raise _no_job(job)
        if changed.verdict == "push":
            raise _push(queue)
        if changed.verdict == "refused":
            raise Problem(400, _refusal(changed, wanted, with_timeout))
        if changed.verdict in _REFUSED:
            raise Problem(*_REFUSED[changed.verdict])
        taken = changed.lease is not None
        headers = {LEASE: str(changed.lease)} if taken else {}
        return JSONResponse({"Taken": taken}, 202, headers)

    async def extend_job(
        self,
        channel: ChannelId,
        consumer: ConsumerId,
        job: JobId,
        lease: Lease,
        wanted: models.JobHeartbeat,
    ) -> Response:
        """Extend the lease of a job that takes long."""
        longer = wanted.IncrementalTimeout
        queue = queue_of(channel, consumer)
        if not await self._jobs.extend(queue, job, lease, longer=longer):
            raise Problem(409, LOST)
        return Response(status_code=202)

    # Who may ask.

    async def _let_in(self, request: Request, needed: Sequence[str]) -> None:
        """Compare the tokens in the headers `needed`, of the channel and of a pull consumer.

        Raises:
            Problem: they are missing or wrong (403), or it is a push consumer (400).
        """
        await self._gate.begin(self._jobs, "channels")
        kinds = ("channel", "consumer")[: len(needed)]
        ids = [request.path_params[kind] for kind in kinds]
        name = f"{kinds[-1]} {'/'.join(ids)}"
        tokens = [request.headers.get(header, "") for header in needed]
        found = await self._gate.let_in(request, name, tokens, partial(self._jobs.find, *ids))
        if found is None:
            raise Problem(
                403,
                f"{' and '.join(needed)} must be right: send what PUT has answered when it was "
                "made, or let an administrator make another with rotate=true",
            )
        consumer = found[1] if len(found) > 1 else None
        if consumer is not None and consumer.type != "pull":
            raise _push(queue_of(*ids))


_REFUSED: Mapping[str, tuple[int, str]] = {
    "lost": (409, LOST),
    "paused": (409, "the queue is paused by an operator: ask again when it is resumed"),
    "expired": (400, "the job has expired before it was taken, and is dead: take another"),
}
"""What a consumer is told of a change that was not made."""


def _refusal(changed: Changed, wanted: JobState, with_timeout: bool) -> str:
    """Why a job cannot change, and what it can become."""
    state = changed.state
    assert state is not None  # noqa: S101 - it was found
    if with_timeout and not is_allowed(state, wanted, with_timeout=True):
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


def _no_job(job: int) -> Problem:
    """It may be another consumer's, which is not told."""
    text = "retention may have removed it; queued-jobs lists those that may be taken"
    return Problem(404, f"this consumer has no job '{job}': {text}")


def _registered(found: Registered, shown: dict[str, Any]) -> Response:
    if found.new_token is not None:
        shown["Token"] = found.new_token
    return JSONResponse(shown, 201 if found.created else 200)


def _shown(job: PullJob) -> dict[str, Any]:
    kind = job.headers.get("content-type")
    content_type = kind if isinstance(kind, str) else "application/octet-stream"
    # A producer may have given a type that ends like that: then it must be true.
    payload, encoded = told_body(job.payload, as_bytes=content_type.endswith(BASE64))
    content_type += BASE64 if encoded else ""
    message = {"MessageID": job.message_id, "Payload": payload, "ContentType": content_type}
    return {"ID": str(job.id), "Priority": job.priority, "Message": message}
