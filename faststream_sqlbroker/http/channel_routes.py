"""Channels and pull consumers over HTTP, compatible with webhook-broker."""

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
    PullJob,
    PullJobState,
    RegisteredEndpoint,
    build_queue_name,
    is_allowed,
)
from faststream_sqlbroker.core.stored import InvalidCursorError
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.database.pull import ChangeResult
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from faststream_sqlbroker.http import channel_models as models
from faststream_sqlbroker.http.api import (
    BODY_ERRORS,
    FORM_ERRORS,
    OPTIONAL_BODY,
    AccessRule,
    Api,
    Caller,
    JobId,
    parse_whole_number,
)
from faststream_sqlbroker.http.gate import AccessControl
from faststream_sqlbroker.http.models import Rotation
from faststream_sqlbroker.http.responses import (
    FORM,
    BodyLimits,
    Problem,
    StoredJsonResponse,
    encode_body,
    read_body,
)

CHANNEL_TOKEN = "X-Broker-Channel-Token"  # noqa: S105 - the name of a header
CONSUMER_TOKEN = "X-Broker-Consumer-Token"  # noqa: S105 - as above
LEASE_HEADER = "X-Broker-Lease"
BASE64 = ";base64"
"""Suffix of the content type of a base64 payload."""
DEFAULT_LIMIT = 25
"""Jobs per page."""
MAX_LIMIT = 100
"""Maximum jobs per page; larger limits are clipped."""
LEASE_LOST = "the lease is lost, another consumer may have the job: abandon it and claim another"
_CONTENT_TYPE = re.compile(r"[ -~]{1,200}")
# The code uses the same pattern; clients can validate an id before they send it.
_ID = {"pattern": "^[A-Za-z0-9][A-Za-z0-9._~-]{0,99}$"}
ChannelId = Annotated[str, Path(description="The channel's id", json_schema_extra=_ID)]
ConsumerId = Annotated[str, Path(description="The consumer's id", json_schema_extra=_ID)]
Lease = Annotated[UUID, Header(alias=LEASE_HEADER, description="The lease that the claim returned")]
OptionalLease = Annotated[
    UUID | SkipJsonSchema[None],
    Header(alias=LEASE_HEADER, description="The lease that the claim returned"),
]
Priority = Annotated[
    int,
    Field(ge=-100, le=100),
    BeforeValidator(parse_whole_number),
    Header(alias="X-Broker-Message-Priority", description="Higher priorities are claimed first"),
]
DedupId = Annotated[
    Annotated[str, Field(pattern="^[!-~]([ -~]{0,253}[!-~])?$")] | SkipJsonSchema[None],
    Header(
        alias="X-Broker-Dedup-Id",
        description="A consumer that has a job with it gets no second job",
    ),
]
Limit = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(lambda value: parse_whole_number(value or DEFAULT_LIMIT)),
    Query(description=f"Jobs per page; at most {MAX_LIMIT}"),
]
After = Annotated[
    str | SkipJsonSchema[None], Query(description="Cursor from the previous page's Link header")
]


class ChannelRoutes:
    """Handles requests about channels."""

    def __init__(
        self, get_jobs: Callable[[], PullJobs], access_control: AccessControl, limits: BodyLimits
    ) -> None:
        """Serve channels; consumers authenticate by channel and consumer token."""
        self._get_jobs = get_jobs
        self._access_control = access_control
        self._limits = limits

    @property
    def _jobs(self) -> PullJobs:
        return self._get_jobs()

    def add_to(self, api: Api, admin: AccessRule) -> None:
        """Add all routes; `admin` admits administrators."""
        channel = "/channel/{channel}"
        consumer = channel + "/consumer/{consumer}"
        job = consumer + "/job/{job}"
        token_headers = (CHANNEL_TOKEN, CONSUMER_TOKEN)
        producers = AccessRule(
            ("channelToken",), partial(self._check_tokens, token_headers=token_headers[:1])
        )
        consumers = AccessRule(
            ("channelToken", "consumerToken"),
            partial(self._check_tokens, token_headers=token_headers),
        )
        add = partial(api.add, part="channels")
        channel_responses = dict.fromkeys((200, 201), models.ChannelShown)
        add(
            f"PUT {channel}",
            self.put_channel,
            admin,
            channel_responses,
            *FORM_ERRORS,
            body=OPTIONAL_BODY,
        )
        consumer_responses = dict.fromkeys((200, 201), models.ConsumerShown)
        add(
            f"PUT {consumer}",
            self.put_consumer,
            admin,
            consumer_responses,
            *FORM_ERRORS,
            404,
            body=OPTIONAL_BODY,
        )
        add(
            f"POST {channel}/broadcast",
            self.broadcast,
            producers,
            dict.fromkeys((200, 201), models.BroadcastShown),
            *(*BODY_ERRORS, 409),
            body={"content": {"*/*": {"schema": {}, "example": {"id": 1}}}},
        )
        add(
            f"GET {consumer}/queued-jobs",
            self.queued_jobs,
            consumers,
            {200: models.QueuedJobs},
            400,
            headers={"Link": "The next page, if any"},
        )
        add(f"GET {job}", self.job, consumers, {200: models.JobShown}, 400, 404)
        add(
            f"POST {job}",
            self.change_job,
            consumers,
            {202: models.JobChanged},
            *(*BODY_ERRORS, 404, 409),
            headers={LEASE_HEADER: "Lease of a claimed job: send it with later requests"},
        )
        add(
            f"POST {job}/heartbeat", self.extend_job, consumers, {202: None}, *BODY_ERRORS, 404, 409
        )

    # For administrators.

    async def put_channel(
        self, channel: ChannelId, form: Annotated[Rotation, Body(media_type=FORM)], user: Caller
    ) -> Response:
        """Create a channel, or rotate its token. Only this response shows the token."""
        await self._access_control.create_configured(self._jobs, "channels")
        registered = await self._jobs.put(channel, by=user.name, rotate=form.is_requested)
        assert registered is not None  # noqa: S101 - only a consumer can be without its channel
        return _create_registration_response(registered, {"ID": registered.id})

    async def put_consumer(
        self,
        channel: ChannelId,
        consumer: ConsumerId,
        form: Annotated[models.ConsumerForm, Body(media_type=FORM)],
        user: Caller,
    ) -> Response:
        """Create a consumer, or change its type (default push). Only this response has a token."""
        await self._access_control.create_configured(self._jobs, "channels")
        registered = await self._jobs.put(
            channel, consumer, kind=form.type, by=user.name, rotate=form.is_requested
        )
        if registered is None:
            text = f"channel {format_value(channel)} does not exist: create it with PUT /channel/ID"
            raise Problem(404, text)
        queue = build_queue_name(channel, registered.id)
        return _create_registration_response(
            registered, {"ID": registered.id, "Type": registered.type, "Queue": queue}
        )

    # For producers.

    async def broadcast(
        self, request: Request, channel: ChannelId, priority: Priority = 0, dedup_id: DedupId = None
    ) -> Response:
        """Publish a job for each consumer of the channel."""
        payload = await read_body(request, self._limits)
        content_type = request.headers.get("content-type")
        if content_type is not None and not _CONTENT_TYPE.fullmatch(content_type):
            received = format_value(content_type)
            text = f"Content-Type must be up to 200 printable ASCII characters, got {received}"
            raise Problem(400, text)
        result = await self._jobs.broadcast(channel, payload, content_type, priority, dedup_id)
        if not result.consumers:
            text = (
                "the channel has no consumer, so no job was published: create one with "
                "PUT /channel/ID/consumer/ID"
            )
            raise Problem(409, text)
        content = {"MessageID": result.message_id if result.jobs else None, "Jobs": result.jobs}
        return JSONResponse(content, 201 if result.jobs else 200)

    # For consumers.

    async def queued_jobs(
        self,
        request: Request,
        channel: ChannelId,
        consumer: ConsumerId,
        limit: Limit = DEFAULT_LIMIT,
        after: After = None,
    ) -> Response:
        """List the jobs that the consumer may claim, highest priority first."""
        limit = min(limit, MAX_LIMIT)
        try:
            jobs, next_cursor = await self._jobs.list_queued(
                build_queue_name(channel, consumer), after, limit
            )
        except InvalidCursorError:
            raise Problem(
                400,
                f"after must be the cursor of a Link header, got {format_value(after)}: omit it "
                "for the first page",
            ) from None
        headers = {}
        if next_cursor is not None:
            query = urlencode({"limit": limit, "after": next_cursor})
            headers["Link"] = f'<{request.url.path}?{query}>; rel="next"'
        result = [_to_job_json(job) for job in jobs]
        return StoredJsonResponse({"Result": result}, headers=headers)

    async def job(self, channel: ChannelId, consumer: ConsumerId, job: JobId) -> Response:
        """Return a job with its state."""
        pull_job = await self._jobs.get_job(build_queue_name(channel, consumer), job)
        if pull_job is None:
            raise _create_no_job_problem(job)
        return StoredJsonResponse(
            {
                **_to_job_json(pull_job),
                "State": pull_job.state.value,
                "RetryCount": pull_job.retries,
            }
        )

    async def change_job(
        self,
        channel: ChannelId,
        consumer: ConsumerId,
        job: JobId,
        change: models.JobChange,
        lease: OptionalLease = None,
    ) -> Response:
        """Claim or end a job."""
        queue = build_queue_name(channel, consumer)
        next_state = PullJobState(change.NextState)
        has_timeout = "IncrementalTimeout" in change.model_fields_set
        extra_seconds = change.IncrementalTimeout if has_timeout else None
        result = await self._jobs.change(queue, job, next_state, longer=extra_seconds, token=lease)
        if result.status == "not_found":
            raise _create_no_job_problem(job)
        if result.status == "push":
            raise _create_push_problem(queue)
        if result.status == "refused":
            raise Problem(400, _format_refusal(result, next_state, has_timeout))
        if result.status in _REFUSALS:
            raise Problem(*_REFUSALS[result.status])
        is_taken = result.lease is not None
        headers = {LEASE_HEADER: str(result.lease)} if is_taken else {}
        return JSONResponse({"Taken": is_taken}, 202, headers)

    async def extend_job(
        self,
        channel: ChannelId,
        consumer: ConsumerId,
        job: JobId,
        lease: Lease,
        heartbeat: models.JobHeartbeat,
    ) -> Response:
        """Extend the lease of a long-running job."""
        extra_seconds = heartbeat.IncrementalTimeout
        queue = build_queue_name(channel, consumer)
        if not await self._jobs.extend(queue, job, lease, longer=extra_seconds):
            raise Problem(409, LEASE_LOST)
        return Response(status_code=202)

    # Authentication.

    async def _check_tokens(self, request: Request, token_headers: Sequence[str]) -> None:
        """Check the tokens of the channel and of a pull consumer in `token_headers`.

        A pull consumer fetches its jobs here; a push consumer has a subscriber of its queue
        instead.

        Raises:
            Problem: a token is missing or wrong (403), or it is a push consumer (400).
        """
        await self._access_control.create_configured(self._jobs, "channels")
        kinds = ("channel", "consumer")[: len(token_headers)]
        ids = [request.path_params[kind] for kind in kinds]
        name = f"{kinds[-1]} {'/'.join(ids)}"
        tokens = [request.headers.get(header, "") for header in token_headers]
        registered = await self._access_control.find_by_tokens(
            request, name, tokens, partial(self._jobs.find_channel, *ids)
        )
        if registered is None:
            raise Problem(
                403,
                f"{' and '.join(token_headers)} must be valid: send what PUT returned, or ask an "
                "administrator for a new token (rotate=true)",
            )
        consumer = registered[1] if len(registered) > 1 else None
        if consumer is not None and consumer.type != "pull":
            raise _create_push_problem(build_queue_name(*ids))


_REFUSALS: Mapping[str, tuple[int, str]] = {
    "lost": (409, LEASE_LOST),
    "paused": (409, "an operator has paused the queue: try again when it is resumed"),
    "expired": (400, "the job expired before it was claimed, and is DEAD: claim another"),
}
"""Responses to refused changes, by the result of the change."""


def _format_refusal(changed: ChangeResult, next_state: PullJobState, has_timeout: bool) -> str:
    """Explain why a job cannot change, and which changes are possible.

    `changed` has the job's current state. `has_timeout` is True for a request with an
    IncrementalTimeout, a time limit of its own, which is only allowed at the start of a job.
    """
    state = changed.state
    assert state is not None  # noqa: S101 - it was found
    if has_timeout and not is_allowed(state, next_state, with_timeout=True):
        text = "IncrementalTimeout is only allowed for QUEUED or DEAD to INFLIGHT"
        return f"{text}, got {state.value} to {next_state.value}: omit it"
    if (state, next_state) in TRANSITIONS:
        return "the job is not due yet: queued-jobs lists the jobs that you may claim"
    next_states = " or ".join(
        to_state.value for from_state, to_state in TRANSITIONS if from_state is state
    )
    transition_note = f"can only become {next_states}" if next_states else "cannot change"
    return f"a job that is {state.value} {transition_note}, got NextState {next_state.value}"


def _create_push_problem(queue: str) -> Problem:
    """Return the problem of a request for jobs of a push consumer, whose queue has subscribers."""
    text = (
        f"this is a push consumer: subscribe to the queue {queue!r}, or ask an administrator to "
        "change it by PUT with type=pull"
    )
    return Problem(400, text)


def _create_no_job_problem(job: int) -> Problem:
    """Return the problem of a missing job, without revealing jobs of other consumers."""
    text = "retention may have removed it; queued-jobs lists the jobs that you may claim"
    return Problem(404, f"this consumer has no job '{job}': {text}")


def _create_registration_response(
    registered: RegisteredEndpoint, content: dict[str, Any]
) -> Response:
    """Return 201 for a new channel or consumer, else 200; the body has a new token, if any."""
    if registered.new_token is not None:
        content["Token"] = registered.new_token
    return JSONResponse(content, 201 if registered.created else 200)


def _to_job_json(job: PullJob) -> dict[str, Any]:
    """Convert a job to the JSON of webhook-broker, whose clients this API serves.

    JSON cannot contain bytes. The content type ends in ";base64" exactly if the payload is base64.
    """
    header = job.headers.get("content-type")
    content_type = header if isinstance(header, str) else "application/octet-stream"
    # A producer may have sent a type with this suffix, so the payload must be base64.
    payload, is_base64 = encode_body(job.payload, as_bytes=content_type.endswith(BASE64))
    content_type += BASE64 if is_base64 else ""
    message = {"MessageID": job.message_id, "Payload": payload, "ContentType": content_type}
    return {"ID": str(job.id), "Priority": job.priority, "Message": message}
