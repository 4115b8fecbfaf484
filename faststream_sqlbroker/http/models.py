"""Request and response bodies for queues; they validate the bodies and describe the API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from faststream_sqlbroker.core.channels import MAX_WAIT

MAX_LEASE = 86_400
"""Seconds of a lease; a heartbeat extends the lease."""
MAX_RESERVED = 100
"""Messages per request."""
MAX_PUBLISHED = 1_000
"""Messages per request."""
MAX_ERROR = 1_000
"""Characters of an error that a client reports."""
MAX_REASON = 255
"""Characters of a reason, the size of its column."""
MAX_KEY = 255
"""Characters of a key, the size of its column."""

Time = Annotated[
    float | str, Field(description='Seconds, or text like "1.5h"', examples=["10m", 2.5])
]

_LEASED: dict[str, Any] = {"lease_token": "0c5e6b0e-2f0c-4b53-9d55-5fd8a3f1a0b1"}
_ENDS = "2026-03-01T12:01:00Z"
_MESSAGE: dict[str, Any] = _LEASED | {
    "id": 17,
    "queue": "orders",
    "body": '{"id":1}',
    "encoding": "text",
    "content_type": "application/json",
    "headers": {"content-type": "application/json"},
    "key": "ann",
    "priority": 0,
    "attempt": 1,
    "deliveries": 1,
    "created_at": "2026-03-01T12:00:00Z",
    "lease_ends_at": _ENDS,
}


class RequestBody(BaseModel):
    """Base of request bodies; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ResponseBody(BaseModel):
    """Base of response bodies."""

    model_config = ConfigDict(extra="forbid")


class Rotation(BaseModel):
    """A form for a token; rotate=true requests a new token."""

    model_config = ConfigDict(extra="forbid")

    rotate: Literal["true", "false"] = "false"

    @property
    def is_requested(self) -> bool:
        """True if a new token is requested."""
        return self.rotate == "true"


class Body(RequestBody):
    """The body of a message."""

    body: Any = Field(description="Any JSON value; a string for the encodings text and base64")
    encoding: Literal["json", "text", "base64"] = Field(
        "json",
        description=(
            "json: stored as JSON; text: stored as UTF-8; base64: stored as the decoded bytes"
        ),
    )
    content_type: str | None = Field(
        None,
        pattern="^[ -~]{1,200}$",
        description="Default by encoding: application/json, text/plain, or not set for base64",
    )


class PublishRequest(Body):
    """A message to publish."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"body": {"id": 1}, "key": "ann", "delay": "10m"}]}
    )

    key: str | None = Field(None, min_length=1, max_length=MAX_KEY)
    priority: int = Field(0, ge=-100, le=100, description="Higher priorities are claimed first")
    dedup_id: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_KEY,
        description="Unique among the live messages of the queue",
    )
    delay: Time | None = Field(
        None, description="Time until the message is due; not with next_attempt_at"
    )
    next_attempt_at: float | None = Field(
        None, description="Time when the message is due, in Unix seconds"
    )
    expires_in: Time | None = Field(
        None, description="Time after which no consumer gets the message"
    )
    headers: dict[str, Any] = Field(default_factory=dict, description="JSON values by name")
    correlation_id: str | None = Field(None, min_length=1, max_length=MAX_KEY)


class NewMessages(RequestBody):
    """Messages to publish in one transaction."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"body": {"id": 1}}, {"body": {"id": 2}}]}]}
    )

    messages: list[PublishRequest] = Field(min_length=1, max_length=MAX_PUBLISHED)


class Reserve(RequestBody):
    """The number of messages to reserve, and the length of the leases."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"limit": 10, "wait": 20}]})

    limit: int = Field(1, ge=1, le=MAX_RESERVED, description="Maximum number of messages")
    wait: float = Field(
        0, ge=0, le=MAX_WAIT, description="Seconds to wait for the first message; 0 does not wait"
    )
    lease_seconds: float = Field(
        60,
        gt=0,
        le=MAX_LEASE,
        description="Length of the leases in seconds, by the database's clock",
    )


class Lease(RequestBody):
    """The lease of a reserved message."""

    lease_token: str = Field(
        pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        description="The lease_token of the reserved message",
        examples=["0c5e6b0e-2f0c-4b53-9d55-5fd8a3f1a0b1"],
    )


class HeartbeatRequest(Lease):
    """Extends a lease."""

    model_config = ConfigDict(json_schema_extra={"examples": [_LEASED | {"lease_seconds": 600}]})

    lease_seconds: float = Field(
        60, gt=0, le=MAX_LEASE, description="Seconds from now; a heartbeat never shortens a lease"
    )


class Commit(Lease):
    """Settles a message as COMPLETED."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [_LEASED | {"result": {"body": {"invoice": 7}}}]}
    )

    result: Body | None = Field(None, description="Replaces the body in the archive")


class Rollback(Lease):
    """Releases a message for another attempt, or ends it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [_LEASED | {"delay": "1m", "error": "the shop is closed"}]}
    )

    outcome: Literal["retry", "release", "fail", "discard"] = Field(
        "retry",
        description=(
            "retry: count a failed attempt, and retry if the strategy allows; "
            "release: count neither an attempt nor a delivery; "
            "fail: end as FAILED; discard: end as DISCARDED"
        ),
    )
    delay: Time | None = Field(
        None,
        description="For retry: time until the message is due; default: the retry strategy decides",
    )
    reason: str | None = Field(
        None, min_length=1, max_length=MAX_REASON, description="Only for fail and discard"
    )
    error: str | None = Field(
        None, max_length=MAX_ERROR, description="Stored with the message; not for release"
    )


class ReservedMessage(ResponseBody):
    """A reserved message."""

    id: int
    queue: str
    body: str
    encoding: Literal["text", "base64"] = Field(description="base64: the body is not UTF-8")
    content_type: str | None
    headers: dict[str, Any]
    key: str | None
    priority: int
    attempt: int = Field(description="1 for the first attempt")
    deliveries: int = Field(description="Number of claims, including this one")
    created_at: str = Field(description="RFC 3339, UTC")
    lease_token: str
    lease_ends_at: str = Field(description="By the database's clock: RFC 3339, UTC")


class Reserved(ResponseBody):
    """The reserved messages in order; empty if no message became due."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": [_MESSAGE]}]})

    messages: list[ReservedMessage]


class LeaseEnd(ResponseBody):
    """The end of a lease."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"lease_ends_at": _ENDS}]})

    lease_ends_at: str = Field(description="By the database's clock: RFC 3339, UTC")


class Settled(ResponseBody):
    """The new state of a message."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"state": "COMPLETED"}]})

    state: Literal["COMPLETED", "FAILED", "DISCARDED", "PENDING", "RETRYABLE"]


class PublishResult(ResponseBody):
    """A published message."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": 17}]})

    id: int | None = Field(description="null if the queue already has this dedup_id")


class PublishedBatch(ResponseBody):
    """Published messages, in the order of the request."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [17, 18]}]})

    ids: list[int | None] = Field(description="null if the queue already has the dedup_id")


class QueueToken(ResponseBody):
    """A token of a queue."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"queue": "orders", "role": "consume"}]}
    )

    queue: str
    role: Literal["publish", "consume"]
    token: str | None = Field(None, description="Only in the response that creates or rotates it")
