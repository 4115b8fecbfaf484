"""The configuration that a broker shares with its routers, publishers and subscribers."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from faststream import UnderlyingDriverAnnotation
from faststream.exceptions import IncorrectState
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from faststream_sqlbroker.adapter.broker import BrokerConfig
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.flow.fleet.heartbeat import Heartbeat
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from faststream_sqlbroker.flow.fleet.rights import Rights
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.flow.consumer import QueueConsumer
    from faststream_sqlbroker.flow.debug_log import DebugLog


def _build_driver_annotations() -> dict[Any, Any]:
    """Map classes that a handler may be annotated with by mistake to the right annotations.

    FastStream then raises an error that names the right annotation.
    """
    # Imported here, because `annotations` imports the broker, which imports this module.
    from faststream_sqlbroker import annotations, message  # noqa: PLC0415

    module = "faststream_sqlbroker"
    pairs = {
        message.SqlBrokerMessage: "SqlBrokerMessage",
        message.SqlBrokerBatchMessage: "SqlBrokerBatchMessage",
        annotations.Broker: "SqlBroker",
        AsyncConnection: "SqlConnection",
        AsyncSession: "SqlSession",
    }
    return {
        wrong: UnderlyingDriverAnnotation(
            type_hint=getattr(annotations, name),
            module=f"{module}.annotations" if name == "SqlBroker" else module,
            name=name,
        )
        for wrong, name in pairs.items()
    }


def _ignore_failure(_rows: Any, _error: BaseException) -> None:
    """Do nothing, because the log has the error."""


@dataclass(kw_only=True)
class SqlBrokerConfig(BrokerConfig):
    """A broker's configuration, which gives publishers and subscribers access to the store."""

    store: Store
    wakeups: Wakeups
    heartbeat: Heartbeat
    lookout: SharedPoller
    housekeeping: Housekeeping
    rights: Rights
    direct_claimer: DirectClaimer
    recorder: Recorder | None = None
    debug: "DebugLog | None" = None
    make_consumer: "Callable[..., QueueConsumer] | None" = None
    """Creates the loops of a subscriber instead of `QueueConsumer`, for tests."""
    note_failure: Callable[[Any, BaseException], None] = _ignore_failure
    """Called with a row or a batch and the error that its handler raised; for tests."""
    payload_names: dict[str, str] = field(default_factory=dict)
    """Names of AsyncAPI schemas, with the text of each schema."""
    default_driver_annotations: Any = field(default_factory=_build_driver_annotations)

    @property
    def engine(self) -> AsyncEngine:
        """The broker's engine, as `SqlBroker.engine`."""
        return self.store.engine


@dataclass(kw_only=True)
class SqlBrokerRouterConfig(BrokerConfig):
    """A router's configuration; everything else comes from the broker that includes the router."""

    default_driver_annotations: Any = field(default_factory=_build_driver_annotations)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse names that only a broker has.

        Called for a missing attribute. A subscriber of a router may be used too early, when no
        broker has included the router.

        Raises:
            IncorrectState: the router is not part of a broker yet.
            AttributeError: a broker does not have the name either.
        """
        raise IncorrectState(_NOT_INCLUDED) if name in _BROKER_ONLY_FIELDS else AttributeError(name)


_BROKER_ONLY_FIELDS = frozenset(item.name for item in fields(SqlBrokerConfig))
_NOT_INCLUDED = "this router is not part of a broker yet: call broker.include_router(router) first"
