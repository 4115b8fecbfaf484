"""Build a subscriber from the arguments of the decorator."""

from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.adapter.endpoints import CallsCollection
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.core.routing import PipelineStep
from faststream_sqlbroker.parser import SqlBrokerBatchParser
from faststream_sqlbroker.subscriber.config import (
    QueueSubscriberConfig,
    QueueSubscriberSpecification,
    QueueSubscriberSpecificationConfig,
)
from faststream_sqlbroker.subscriber.options import SubscriberSettings
from faststream_sqlbroker.subscriber.running_calls import NoCalls
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber

if TYPE_CHECKING:
    from faststream import AckPolicy


def create_subscriber(
    settings: SubscriberSettings,
    *,
    outer_config: Any,
    ack_policy: "AckPolicy" = EMPTY,
    no_reply: bool,
    title: str | None,
    description: str | None,
    include_in_schema: bool,
    pipeline_step: PipelineStep | None = None,
) -> QueueSubscriber:
    """Create a subscriber from settings, parser and documentation.

    `ack_policy` is the passed policy, or EMPTY; `pipeline_step` is the step of a pipeline that the
    subscriber becomes.
    """
    config = QueueSubscriberConfig(
        _outer_config=outer_config, _ack_policy=ack_policy, no_reply=no_reply, settings=settings
    )
    parser = SqlBrokerBatchParser()
    config.parser = parser.parse_batch if settings.batch else parser.parse_message
    config.decoder = parser.decode_batch if settings.batch else parser.decode_message
    calls: CallsCollection[Any] = CallsCollection() if settings.forward_to is None else NoCalls()
    specification = QueueSubscriberSpecification(
        outer_config,
        QueueSubscriberSpecificationConfig(
            queues=settings.queues,
            forward_to=settings.forward_to,
            pipeline_step=pipeline_step,
            title_=title,
            description_=description,
            include_in_schema=include_in_schema,
        ),
        calls,
    )
    subscriber = QueueSubscriber(config, specification, calls)
    # Without answers, an invalid reply_to in a message does not matter, so it is not logged.
    if not no_reply:
        parser.log = subscriber._log_of_loops  # noqa: SLF001 - created together
    return subscriber
