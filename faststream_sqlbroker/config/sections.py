"""Sections of a file. Options have the names and types of their Python declarations.

Policies, retry strategies and other objects that options take are fields as well.
"""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from faststream_sqlbroker.broker.broker import SqlBroker
from faststream_sqlbroker.broker.scheduling import ScheduleOptions
from faststream_sqlbroker.config.declared import (
    list_call_options,
    list_class_options,
    list_dict_options,
)
from faststream_sqlbroker.config.fields import (
    Section,
    convert_setup_error,
    create_choice,
    create_object_field,
    create_section,
)
from faststream_sqlbroker.core import retry
from faststream_sqlbroker.core.channels import Channel, Channels, Consumer, Queues, QueueTokens
from faststream_sqlbroker.core.checks import validate_queue
from faststream_sqlbroker.core.depth import MaxDepth
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.combinations import POLICY_CLASSES
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


def to_key(kind: type) -> str:
    """Return the key of a class in a file: keep_last for KeepLast, no_retry for NoRetryStrategy."""
    name = kind.__name__.removesuffix("Strategy")
    if name != "NoRetry":
        name = name.removesuffix("Retry")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _get_summary(kind: type) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def _create_object_field(kind: type, *, short: bool = False, object_types: Any = None) -> Any:
    """Return the field type for an object of the class `kind`, such as a policy.

    With `short`, a value stands for the only required argument: `delay: 5m`.
    """
    options = list_class_options(kind)
    required = [option.name for option in options if option.is_required]
    model = create_section(kind.__name__, options, object_types=object_types)
    return create_object_field(
        model, kind, short=required[0] if short and len(required) == 1 else None
    )


def _create_choice(name: str, kinds: tuple[type, ...], *, short: bool) -> Any:
    """Return the field type for an object whose key in the file selects the class of `kinds`.

    For example, `throttle:` selects the policy Throttle. With `short`, a value stands for a class's
    only required argument.
    """
    return create_choice(
        name,
        {to_key(kind): _create_object_field(kind, short=short) for kind in kinds},
        {to_key(kind): _get_summary(kind) for kind in kinds},
    )


PolicyField = _create_choice("Policy", POLICY_CLASSES, short=True)
StrategyField = _create_choice("RetryStrategy", STRATEGIES, short=False)

_CONSUMER = _create_object_field(Consumer)
_CHANNEL = _create_object_field(Channel, object_types={Consumer: _CONSUMER})
OBJECTS: dict[Any, Any] = {
    Channels: _create_object_field(Channels, object_types={Channel: _CHANNEL}),
    Policy: PolicyField,
    retry.RetryStrategyProto: StrategyField,
    MaxDepth: _create_object_field(MaxDepth),
    Queues: _create_object_field(
        Queues,
        object_types={
            QueueTokens: _create_object_field(QueueTokens),
            retry.RetryStrategyProto: StrategyField,
        },
    ),
    Retention: _create_object_field(Retention),
    SqlBrokerSchemaConfig: _create_object_field(SqlBrokerSchemaConfig),
}
"""Field types, by the types of options."""


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
"""Options that only code can set: objects, and texts for AsyncAPI documents. `from_yaml` accepts
all of these except the engine.
"""


def _validate_queue_name(value: str) -> Any:
    """Return a valid queue name unchanged; raise Pydantic's error for other values."""
    return convert_setup_error(validate_queue, value)


QueueName = Annotated[str, AfterValidator(_validate_queue_name)]


class _BrokerBase(Section):
    url: str = Field(
        repr=False,
        description="SQLAlchemy URL of the database, with an asynchronous driver. Take it, or its "
        "password, from the environment: ${NAME}.",
    )
    metrics: bool = Field(
        False,
        description="Export the broker's metrics to Prometheus at `/metrics`; needs the extra "
        "prometheus.",
    )


class _QueueBase(Section):
    handler: str | None = Field(
        None,
        description="Function that handles the queue's messages, as module:name. Give either this "
        "or forward_to.",
    )

    @model_validator(mode="before")
    @classmethod
    def _replace_none(cls, value: Any) -> Any:
        """Treat a queue without a value as an empty section; errors then name missing options."""
        return {} if value is None else value

    @model_validator(mode="after")
    def _check_single_target(self) -> Any:
        """Require either `handler` or `forward_to`.

        A queue is handled by a function, or its messages move on to other queues.
        """
        targets = [
            name for name in ("handler", "forward_to") if self.get_options().get(name) is not None
        ]
        if len(targets) != 1:
            text = (
                "a queue needs either handler or forward_to, got "
                f"{' and '.join(targets) or 'neither'}; list a queue that another program consumes "
                "under destinations"
            )
            raise PydanticCustomError("one_way", "{text}", {"text": text})
        return self


class UserSection(Section):
    """A user of the HTTP interface."""

    name: str = Field(description="Name of the user, without a colon.")
    role: Literal["viewer", "operator", "admin"] = Field(description="Permissions of the user.")
    password_hash: str = Field(repr=False, description="Output of `sqlbroker hash-password`.")


class ProxySection(Section):
    """Users authenticated by a proxy."""

    header: str = Field(description='Header with the user name, such as "X-Forwarded-User".')
    proxies: list[str] = Field(description="Addresses or networks of the proxies.")
    roles: dict[str, Literal["viewer", "operator", "admin"]] = Field(
        description="Role of each user."
    )


class _HttpBase(Section):
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65_535, description="Port to listen on; 0 picks a free port.")
    certificate: str | None = Field(None, description="TLS certificate, a PEM file.")
    key: str | None = Field(None, description="Private key of the certificate, a PEM file.")
    users: list[UserSection] = Field([], description="Users who log in with a password.")
    proxy_auth: ProxySection | None = Field(None, description="Users authenticated by a proxy.")

    @model_validator(mode="after")
    def _check_tls(self) -> Any:
        """Require a certificate and a key together; without both the server has no TLS."""
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            text = f"TLS needs both certificate and key: give {missing} too"
            raise PydanticCustomError("tls", "{text}", {"text": text})
        return self


_ASGI = list_call_options(SqlBroker.asgi, exclude=("auth", "redact"))
HTTP_OPTIONS = tuple(option.name for option in _ASGI)
"""Options of `broker.asgi`."""

if TYPE_CHECKING:
    # Options derived from declarations are read by `get_options`.
    BrokerSection = _BrokerBase
    QueueSection = _QueueBase
    ScheduleSection = Section
    HttpSection = _HttpBase
else:
    BrokerSection = create_section(
        "BrokerSection",
        list_call_options(SqlBroker.__init__, exclude=CODE_OPTIONS),
        base=_BrokerBase,
        object_types=OBJECTS,
        hidden=("listen_url",),
    )
    QueueSection = create_section(
        "QueueSection", list_dict_options(SubscriberOptions), base=_QueueBase, object_types=OBJECTS
    )
    ScheduleSection = create_section(
        "ScheduleSection",
        [
            *list_call_options(SqlBroker.publish_on_schedule, exclude=("name",)),
            *list_dict_options(ScheduleOptions),
        ],
    )
    HttpSection = create_section(
        "HttpSection", _ASGI, base=_HttpBase, object_types=OBJECTS, hidden=("csrf_secret",)
    )


class ServiceConfig(Section):
    """A service: a broker, its queues, schedules, and the broker over HTTP."""

    broker: BrokerSection = Field(description="Database and options of SqlBroker.")
    queues: dict[QueueName, QueueSection] = Field(
        {}, description="Queues that this service consumes, by name."
    )
    destinations: list[QueueName] = Field(
        [], description="Queues that this service may publish to, and other programs consume."
    )
    schedules: dict[str, ScheduleSection] = Field(
        {}, description="Schedules that publish messages, by name."
    )
    http: HttpSection | None = Field(
        None, description="Options of the HTTP server `sqlbroker serve`."
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors."""
    schema = ServiceConfig.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
