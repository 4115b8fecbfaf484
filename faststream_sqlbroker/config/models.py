"""The sections of a file. Their options are those of Python, under the same names; the policies,
retry strategies and other objects that options take are fields, too.
"""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from faststream_sqlbroker.broker.broker import SqlBroker
from faststream_sqlbroker.broker.scheduling import ScheduleOptions
from faststream_sqlbroker.config.declared import options_of_call, options_of_class, options_of_dict
from faststream_sqlbroker.config.fields import Section, built, choice, derived
from faststream_sqlbroker.core import retry
from faststream_sqlbroker.core.channels import Channel, Channels, Consumer, Queues, QueueTokens
from faststream_sqlbroker.core.checks import queue_problem
from faststream_sqlbroker.core.depth import MaxDepth
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.checks import KINDS
from faststream_sqlbroker.core.retention import Retention
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.subscriber.options import SubscriberOptions

STRATEGIES = (
    retry.ConstantRetryStrategy,
    retry.ConstantWithJitterRetryStrategy,
    retry.LinearRetryStrategy,
    retry.ExponentialBackoffRetryStrategy,
    retry.ExponentialBackoffWithJitterRetryStrategy,
    retry.NoRetryStrategy,
)


def key_of(kind: type) -> str:
    """How a file writes a class: KeepLast is keep_last, NoRetryStrategy is no_retry."""
    name = kind.__name__.removesuffix("Strategy")
    if name != "NoRetry":
        name = name.removesuffix("Retry")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _meaning(kind: type) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def _object(kind: type, *, short: bool = False, known: Any = None) -> Any:
    options = options_of_class(kind)
    needed = [option.name for option in options if option.needed]
    model = derived(kind.__name__, options, known=known)
    return built(model, kind, short=needed[0] if short and len(needed) == 1 else None)


def _choice(name: str, kinds: tuple[type, ...], *, short: bool) -> Any:
    return choice(
        name,
        {key_of(kind): _object(kind, short=short) for kind in kinds},
        {key_of(kind): _meaning(kind) for kind in kinds},
    )


PolicyField = _choice("Policy", KINDS, short=True)
StrategyField = _choice("RetryStrategy", STRATEGIES, short=False)

_CONSUMER = _object(Consumer)
_CHANNEL = _object(Channel, known={Consumer: _CONSUMER})
OBJECTS: dict[Any, Any] = {
    Channels: _object(Channels, known={Channel: _CHANNEL}),
    Policy: PolicyField,
    retry.RetryStrategyProto: StrategyField,
    MaxDepth: _object(MaxDepth),
    Queues: _object(
        Queues,
        known={QueueTokens: _object(QueueTokens), retry.RetryStrategyProto: StrategyField},
    ),
    Retention: _object(Retention),
    SqlBrokerSchemaConfig: _object(SqlBrokerSchemaConfig),
}
"""Types of fields, by the types of what options take."""


CODE_OPTIONS = (
    "engine",
    "metrics",
    "decoder",
    "parser",
    "codec",
    "dependencies",
    "middlewares",
    "routers",
    "security",
    "specification_url",
    "protocol",
    "protocol_version",
    "description",
    "tags",
    "logger",
    "log_level",
    "apply_types",
    "serializer",
    "provider",
    "context",
    "id_generator",
    "underlying_driver_annotations",
)
"""Options that only code can give: objects, and what AsyncAPI documents say. `from_yaml` takes all
but the engine."""


def _queue_name(value: str) -> str:
    if (problem := queue_problem(value)) is not None:
        raise PydanticCustomError(
            "queue", "{text}", {"text": f"{value!r} names no queue: {problem}"}
        )
    return value


QueueName = Annotated[str, AfterValidator(_queue_name)]


class _BrokerBase(Section):
    url: str = Field(
        repr=False,
        description="SQLAlchemy URL of the database, with an asynchronous driver. Take it, or its "
        "password, from the environment: ${NAME}.",
    )
    metrics: bool = Field(
        False,
        description="Whether `/metrics` tells Prometheus what the broker does; needs the extra "
        "prometheus.",
    )


class _QueueBase(Section):
    handler: str | None = Field(
        None,
        description="The function that handles the queue's messages, as module:name; a queue has "
        "this or forward_to.",
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_below(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _one_way(self) -> Any:
        ways = [name for name in ("handler", "forward_to") if self.given().get(name) is not None]
        if len(ways) != 1:
            text = (
                "a queue has a handler or forward_to, this has "
                f"{' and '.join(ways) or 'neither'}; name a queue that another program consumes "
                "below destinations"
            )
            raise PydanticCustomError("one_way", "{text}", {"text": text})
        return self


class UserSection(Section):
    """Who may ask over HTTP."""

    name: str = Field(description="As the user gives it; without a colon.")
    role: Literal["viewer", "operator", "admin"] = Field(description="What the user may do.")
    password_hash: str = Field(
        repr=False, description="What `sqlbroker hash-password` has printed."
    )


class ProxySection(Section):
    """Users whom a proxy has authenticated."""

    header: str = Field(description='The header that names them, such as "X-Forwarded-User".')
    proxies: list[str] = Field(description="Addresses or networks of the proxies.")
    roles: dict[str, Literal["viewer", "operator", "admin"]] = Field(
        description="The role of each user."
    )


class _HttpBase(Section):
    host: str = Field("127.0.0.1", description="The address to listen on.")
    port: int = Field(8080, ge=0, le=65_535, description="The port; 0 takes a free one.")
    certificate: str | None = Field(None, description="The certificate of TLS, a file of PEM.")
    key: str | None = Field(None, description="Its private key, a file of PEM.")
    users: list[UserSection] = Field([], description="Users who are known by their passwords.")
    proxy_auth: ProxySection | None = Field(
        None, description="Users whom a proxy has authenticated."
    )

    @model_validator(mode="after")
    def _both_of_tls(self) -> Any:
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            text = f"TLS needs both a certificate and its key: give {missing}, too"
            raise PydanticCustomError("tls", "{text}", {"text": text})
        return self


_ASGI = options_of_call(SqlBroker.asgi, without=("auth", "redact"))
HTTP_OPTIONS = tuple(option.name for option in _ASGI)
"""Options of `broker.asgi`."""

if TYPE_CHECKING:
    # Options that are made of declarations are read by `given`.
    BrokerSection = _BrokerBase
    QueueSection = _QueueBase
    ScheduleSection = Section
    HttpSection = _HttpBase
else:
    BrokerSection = derived(
        "BrokerSection",
        options_of_call(SqlBroker.__init__, without=CODE_OPTIONS),
        base=_BrokerBase,
        known=OBJECTS,
        hidden=("listen_url",),
    )
    QueueSection = derived(
        "QueueSection", options_of_dict(SubscriberOptions), base=_QueueBase, known=OBJECTS
    )
    ScheduleSection = derived(
        "ScheduleSection",
        [
            *options_of_call(SqlBroker.publish_on_schedule, without=("name",)),
            *options_of_dict(ScheduleOptions),
        ],
    )
    HttpSection = derived(
        "HttpSection", _ASGI, base=_HttpBase, known=OBJECTS, hidden=("csrf_secret",)
    )


class ServiceConfig(Section):
    """A service: a broker, its queues, schedules, and the broker over HTTP."""

    broker: BrokerSection = Field(description="The database, and options of SqlBroker.")
    queues: dict[QueueName, QueueSection] = Field(
        {}, description="The queues that this service consumes, by their names."
    )
    destinations: list[QueueName] = Field(
        [], description="Queues that other programs consume, and this service may send to."
    )
    schedules: dict[str, ScheduleSection] = Field(
        {}, description="Messages at set times, by the names of their schedules."
    )
    http: HttpSection | None = Field(
        None, description="The broker over HTTP, in `sqlbroker serve`."
    )


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the file, for editors."""
    found = ServiceConfig.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
