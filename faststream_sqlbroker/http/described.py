"""The requests of the HTTP API, and the answers that each may get."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from faststream_sqlbroker.http import channel_models as jobs
from faststream_sqlbroker.http import models

Access = Literal["open", "viewer", "operator", "admin", "channel", "consumer", "publish", "consume"]
"""Who may send a request: all, users with a role, or those who have a token."""
Part = Literal["probes", "mirror", "channels", "queues"]
"""What an application may serve; the tag of its requests."""
TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One request."""

    method: str
    path: str
    name: str
    summary: str
    part: Part
    access: Access
    answers: Mapping[int, type[BaseModel] | str | None]
    """By status; text is the content type of what is no JSON, None: there is no body."""
    problems: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    """A body that is no JSON."""
    parameters: tuple[Mapping[str, Any], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the answers: what each tells."""


def _in(where: str, name: str, schema: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    required = {"required": True} if where == "path" else {}
    return {"name": name, "in": where, "schema": schema, "description": text, **required}


# The pattern is that of the code, so that clients can check an id before they send it.
_ID = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._~-]{0,99}$"}
_FORM = "application/x-www-form-urlencoded"
_CHANNEL = _in("path", "channel", _ID, "The channel's id")
_CONSUMER = _in("path", "consumer", _ID, "The consumer's id")
_JOB = _in("path", "job", {"type": "string", "pattern": "^[0-9]{1,19}$"}, "The job's id")
_QUEUE = _in("path", "queue", {**TEXT, "minLength": 1}, "The queue's name, as it is or encoded")
_MESSAGE = _in("path", "message", {"type": "integer", "minimum": 0}, "The message's id")
_LEASE = _in("header", "X-Broker-Lease", {**TEXT, "format": "uuid"}, "What the claim has answered")
_ROTATE = {"rotate": {"type": "string", "enum": ["true", "false"], "default": "false"}}
_TYPE = {"type": {"type": "string", "enum": ["push", "pull", ""], "default": "push"}}
# What reading a body may end in, whatever it should hold.
_BODY = (400, 408, 413)
_FORM_BODY = (*_BODY, 415)


def _form(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return {_FORM: {"schema": schema}}


_PROBES = (
    Operation(
        method="get",
        path="/health/live",
        name="live",
        summary="Whether the process answers",
        part="probes",
        access="open",
        answers={200: jobs.Live},
    ),
    Operation(
        method="get",
        path="/health/ready",
        name="ready",
        summary="Whether the process can work",
        part="probes",
        access="open",
        answers={200: jobs.Ready, 503: jobs.Ready},
    ),
    Operation(
        method="get",
        path="/metrics",
        name="metrics",
        summary="Metrics for Prometheus",
        part="probes",
        access="viewer",
        answers={200: "text/plain"},
        problems=(404,),
    ),
    Operation(
        method="get",
        path="/csrf-token",
        name="csrfToken",
        summary="What a browser sends with each write",
        part="probes",
        access="viewer",
        answers={200: jobs.CsrfToken},
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="openapi",
        summary="This document",
        part="probes",
        access="viewer",
        answers={200: "application/json"},
    ),
)
# No path has a part for them: each may be missing.
_LOOKED_UP = (
    _in("query", "Lookup", TEXT, "The lookup value; each filter may be missing"),
    _in("query", "Info", TEXT, "The info"),
)
_MIRROR = (
    Operation(
        method="get",
        path="/v1/count",
        name="count",
        summary="How many live messages have this lookup value and info",
        part="mirror",
        access="viewer",
        parameters=_LOOKED_UP,
        answers={200: jobs.Count},
        problems=(400,),
    ),
    Operation(
        method="get",
        path="/v1/mirror",
        name="mirrored",
        summary="Their records; what show_bodies and redact hide is null",
        part="mirror",
        access="operator",
        parameters=_LOOKED_UP,
        answers={200: jobs.Mirrored},
        problems=(400,),
    ),
    Operation(
        method="patch",
        path="/v1/mirror",
        name="setInfo",
        summary="Change their info",
        part="mirror",
        access="operator",
        body=jobs.InfoChange,
        answers={200: jobs.InfoChanged},
        problems=_BODY,
    ),
    Operation(
        method="get",
        path="/v1/diagnosis",
        name="diagnosis",
        summary="All that the broker depends on",
        part="probes",
        access="admin",
        answers={200: "application/json"},
    ),
)
_CHANNELS = (
    Operation(
        method="put",
        path="/channel/{channel}",
        name="putChannel",
        summary="Make a channel, or give it a new token",
        part="channels",
        access="admin",
        parameters=(_CHANNEL,),
        content=_form(_ROTATE),
        answers={200: jobs.ChannelShown, 201: jobs.ChannelShown},
        problems=_FORM_BODY,
    ),
    Operation(
        method="put",
        path="/channel/{channel}/consumer/{consumer}",
        name="putConsumer",
        summary="Make a consumer, or change its type; missing or empty is push",
        part="channels",
        access="admin",
        parameters=(_CHANNEL, _CONSUMER),
        content=_form({**_TYPE, **_ROTATE}),
        answers={200: jobs.ConsumerShown, 201: jobs.ConsumerShown},
        problems=(*_FORM_BODY, 404),
    ),
    Operation(
        method="post",
        path="/channel/{channel}/broadcast",
        name="broadcast",
        summary="Publish a job for each consumer of the channel",
        part="channels",
        access="channel",
        parameters=(
            _CHANNEL,
            _in(
                "header",
                "X-Broker-Message-Priority",
                {"type": "integer", "minimum": -100, "maximum": 100, "default": 0},
                "Higher ones are taken first",
            ),
            _in(
                "header",
                "X-Broker-Dedup-Id",
                {"type": "string", "pattern": "^[!-~]([ -~]{0,253}[!-~])?$"},
                "A consumer that has a job with it gets no other",
            ),
        ),
        content={"*/*": {"schema": {}, "example": {"id": 1}}},
        answers={200: jobs.BroadcastShown, 201: jobs.BroadcastShown},
        problems=(*_BODY, 409),
    ),
    Operation(
        method="get",
        path="/channel/{channel}/consumer/{consumer}/queued-jobs",
        name="queuedJobs",
        summary="The jobs that may be taken",
        part="channels",
        access="consumer",
        parameters=(
            _CHANNEL,
            _CONSUMER,
            _in(
                "query",
                "limit",
                {"type": "integer", "minimum": 1, "default": 25},
                "Jobs of a page; 100 at most",
            ),
            _in("query", "after", TEXT, "Of the link to this page"),
        ),
        answers={200: jobs.QueuedJobs},
        headers={"Link": "The next page, if there is one"},
        problems=(400,),
    ),
    Operation(
        method="get",
        path="/channel/{channel}/consumer/{consumer}/job/{job}",
        name="job",
        summary="One job with its state",
        part="channels",
        access="consumer",
        parameters=(_CHANNEL, _CONSUMER, _JOB),
        answers={200: jobs.JobShown},
        problems=(400, 404),
    ),
    Operation(
        method="post",
        path="/channel/{channel}/consumer/{consumer}/job/{job}",
        name="changeJob",
        summary="Take a job, or end it",
        part="channels",
        access="consumer",
        parameters=(_CHANNEL, _CONSUMER, _JOB, _LEASE),
        body=jobs.JobChange,
        answers={202: None},
        headers={"X-Broker-Lease": "Of a job that was taken: send it with what follows"},
        problems=(*_BODY, 404, 409),
    ),
    Operation(
        method="post",
        path="/channel/{channel}/consumer/{consumer}/job/{job}/heartbeat",
        name="extendJob",
        summary="Extend the lease of a job",
        part="channels",
        access="consumer",
        parameters=(_CHANNEL, _CONSUMER, _JOB, {**_LEASE, "required": True}),
        body=jobs.JobHeartbeat,
        answers={202: None},
        problems=(*_BODY, 404, 409),
    ),
)
_QUEUES = (
    Operation(
        method="put",
        path="/v1/queues/{queue}/tokens/{role}",
        name="putQueueToken",
        summary="Make the token of a queue, or another one",
        part="queues",
        access="admin",
        parameters=(
            _QUEUE,
            _in("path", "role", {"enum": ["publish", "consume"]}, "What the token allows"),
        ),
        content=_form(_ROTATE),
        answers={200: models.QueueToken, 201: models.QueueToken},
        problems=(*_FORM_BODY, 404),
    ),
    Operation(
        method="post",
        path="/v1/queues/{queue}/publish",
        name="publish",
        summary="Publish a message",
        part="queues",
        access="publish",
        parameters=(_QUEUE,),
        body=models.NewMessage,
        answers={200: models.Published, 201: models.Published},
        problems=_BODY,
    ),
    Operation(
        method="post",
        path="/v1/queues/{queue}/publish-batch",
        name="publishBatch",
        summary="Publish messages in one transaction",
        part="queues",
        access="publish",
        parameters=(_QUEUE,),
        body=models.NewMessages,
        answers={201: models.PublishedBatch},
        problems=_BODY,
    ),
    Operation(
        method="post",
        path="/v1/queues/{queue}/reserve",
        name="reserve",
        summary="Lease messages; wait for the first of them",
        part="queues",
        access="consume",
        parameters=(_QUEUE,),
        body=models.Reserve,
        answers={200: models.Reserved},
        problems=_BODY,
    ),
    Operation(
        method="post",
        path="/v1/queues/{queue}/messages/{message}/heartbeat",
        name="extend",
        summary="Extend the lease of a message",
        part="queues",
        access="consume",
        parameters=(_QUEUE, _MESSAGE),
        body=models.Heartbeat,
        answers={200: models.LeaseEnd},
        problems=(*_BODY, 404, 409),
    ),
    Operation(
        method="post",
        path="/v1/queues/{queue}/messages/{message}/commit",
        name="commit",
        summary="Settle a message as COMPLETED",
        part="queues",
        access="consume",
        parameters=(_QUEUE, _MESSAGE),
        body=models.Commit,
        answers={200: models.Settled},
        problems=(*_BODY, 404, 409),
    ),
    Operation(
        method="post",
        path="/v1/queues/{queue}/messages/{message}/rollback",
        name="rollback",
        summary="Give a message back, or up",
        part="queues",
        access="consume",
        parameters=(_QUEUE, _MESSAGE),
        body=models.Rollback,
        answers={200: models.Settled},
        problems=(*_BODY, 404, 409),
    ),
)
OPERATIONS = (*_PROBES, *_MIRROR, *_CHANNELS, *_QUEUES)
