"""Request and response bodies for channels and probes, as in the OpenAPI document.

Field names are those of webhook-broker.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from faststream_sqlbroker.core.channels import MAX_TIMEOUT
from faststream_sqlbroker.http.models import RequestBody, ResponseBody, Rotation

# An example in the form of a token; it opens nothing.
_TOKEN = "u3Jx0yK1mQ8b6TqVnZ2w5Rr7cFdLhA9eGsPiXoYtM4E"  # noqa: S105 - an example


class ChannelError(ResponseBody):
    """An error message for people."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"error": "limit must be 1 or more, got 0"}]}
    )

    error: str


class ChannelShown(ResponseBody):
    """A channel."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ID": "orders", "Token": _TOKEN}]})

    ID: str
    Token: str | None = Field(None, description="Only in the response that creates or rotates it")


class ConsumerShown(ChannelShown):
    """A consumer of a channel."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"ID": "billing", "Type": "pull", "Queue": "orders/billing", "Token": _TOKEN}
            ]
        }
    )

    Type: Literal["push", "pull"]
    Queue: str = Field(description="Queue of the consumer's jobs")


class ConsumerForm(Rotation):
    """The type of a consumer; rotate=true requests a new token."""

    type: Literal["push", "pull", ""] = "push"


class BroadcastShown(ResponseBody):
    """The result of a message to all consumers of a channel."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"MessageID": "0c5e6b0e2f0c4b539d555fd8a3f1a0b1", "Jobs": 2}]
        }
    )

    MessageID: str | None = Field(
        description="null if all consumers have a job with this X-Broker-Dedup-Id"
    )
    Jobs: int


class JobMessage(ResponseBody):
    """The message of a job."""

    MessageID: str = Field(description="Shared by all jobs of one message")
    Payload: str
    ContentType: str = Field(description="Ends in ;base64 if the payload is base64")


_MESSAGE: dict[str, Any] = {
    "MessageID": "0c5e6b0e2f0c4b539d555fd8a3f1a0b1",
    "Payload": '{"id": 1}',
    "ContentType": "application/json",
}
_JOB: dict[str, Any] = {"ID": "17", "Priority": 0, "Message": _MESSAGE}


class ChannelJob(ResponseBody):
    """A job that the consumer may claim."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB]})

    ID: str
    Priority: int
    Message: JobMessage


class JobShown(ChannelJob):
    """A job with its state."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**_JOB, "State": "INFLIGHT", "RetryCount": 0}]}
    )

    State: Literal["QUEUED", "INFLIGHT", "DELIVERED", "DEAD"]
    RetryCount: int


class QueuedJobs(ResponseBody):
    """A page of jobs, highest priority first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"Result": [_JOB]}]})

    Result: list[ChannelJob]


class JobHeartbeat(BaseModel):
    """Extends a lease to the server's timeout and additional seconds from now."""

    model_config = ConfigDict(
        strict=True, json_schema_extra={"examples": [{"IncrementalTimeout": 600}]}
    )

    IncrementalTimeout: int = Field(0, ge=0, le=MAX_TIMEOUT, description="Additional seconds")


class JobChange(BaseModel):
    """Claims or ends a job."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"examples": [{"NextState": "INFLIGHT", "IncrementalTimeout": 600}]},
    )

    NextState: Literal["INFLIGHT", "DELIVERED", "DEAD"]
    IncrementalTimeout: int = Field(
        0, ge=0, le=MAX_TIMEOUT, description="Additional seconds of the lease; only to claim a job"
    )


class JobChanged(ResponseBody):
    """The job is in the requested state."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"Taken": True}]})

    Taken: bool = Field(
        description="True if this request claimed the job and has its lease; of several concurrent "
        "requests only one does"
    )


class MessageCount(RootModel[int]):
    """The number of messages."""

    model_config = ConfigDict(json_schema_extra={"examples": [3]})


# The names are those of the record; the page about the mirror explains the values.
class MirroredRecord(ResponseBody):
    """A message with a lookup value; Payload is base64, times are ISO 8601."""

    Name: Any
    DestinationTopic: Any
    EntryTime: Any
    Info: Any
    Lookup: Any
    Payload: Any
    Properties: Any
    PublishAfter: Any
    PublishCount: Any
    PublishTime: Any


class Mirrored(ResponseBody):
    """At most 100 records."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"Result": []}]})

    Result: list[MirroredRecord]


class InfoChange(RequestBody):
    """Sets the info of all messages with a lookup value, or only of the message with this Name."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"Lookup": "order-1", "Info": "packed"}]}
    )

    Lookup: str
    Info: str | None = Field(description="null removes the info")
    Name: str | None = Field(None, pattern="^[0-9]{1,19}$")


class InfoChanged(ResponseBody):
    """The number of changed messages."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"Changed": 1}]})

    Changed: int


class Live(ResponseBody):
    """The process responds."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "live"}]})

    status: Literal["live"]


class Ready(ResponseBody):
    """The readiness of this process."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "status": "not ready",
                    "checks": {
                        "started": True,
                        "database": False,
                        "schema": False,
                        "subscribers": True,
                    },
                    "reason": "the database takes no writes: the server is a read-only standby",
                    "last_claim_ago": 0.012,
                    "last_flush_ago": 0.034,
                }
            ]
        }
    )

    status: Literal["ready", "not ready"]
    checks: dict[str, bool]
    reason: str | None = Field(description="Why the database accepts no writes")
    last_claim_ago: float | None = Field(
        description="Seconds since the last claim; the maximum of all subscribers"
    )
    last_flush_ago: float | None = Field(
        description="Seconds since the last flush; the maximum of all subscribers"
    )


class CsrfToken(ResponseBody):
    """The token that a browser must send with each write, as X-CSRF-Token."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"token": "5f2c"}]})

    token: str
