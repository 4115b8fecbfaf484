"""Decide whether a publish without options other than a transaction may bypass FastStream."""

from typing import Any

from faststream.message import gen_cor_id

from faststream_sqlbroker.adapter.broker import BrokerUsecase
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer, is_plain
from faststream_sqlbroker.subscriber.pipeline.fingerprints import (
    GENERIC,
    find_unknown,
    get_selected_pipeline,
    warn_once,
)
from faststream_sqlbroker.subscriber.pipeline.replaced import PUBLISHING

_BYPASSED_METHODS = ("connect", "middlewares", "_basic_publish")
"""Methods of FastStream's broker that run for a publish."""


class PlainPublish:
    """Decides for each publish whether it may skip FastStream's publish path, which is slower."""

    def __init__(self) -> None:
        """Bypass nothing until `check_broker` is called."""
        self._is_known = False

    def check_broker(self, broker: Any) -> None:
        """Check everything about `broker` that does not change after connecting.

        A subclass may override a method, and an unknown version of FastStream may do other work in
        it; neither may be bypassed.

        Raises:
            SetupError: the environment variable has an unknown value.
        """
        is_unmodified = all(
            getattr(type(broker), s) is getattr(BrokerUsecase, s) for s in _BYPASSED_METHODS
        )
        names = find_unknown(PUBLISHING)
        if names:
            warn_once(PUBLISHING, "FastStream publishes", names, broker._log_of_loops)  # noqa: SLF001
        self._is_known = is_unmodified and not names and get_selected_pipeline() != GENERIC

    def find_producer(self, broker: Any) -> SqlBrokerProducer | None:
        """Return the producer if no middleware, test or id generator takes part, otherwise None.

        Called for each publish, because this may change while the broker runs.
        """
        # A single configuration is that of a broker without a surrounding router.
        configs = broker.config.configs
        if not self._is_known or len(configs) != 1 or broker._connection is None:  # noqa: SLF001
            return None
        config = configs[0]
        producer = config.producer
        if config.broker_middlewares or config.id_generator is not gen_cor_id:
            return None
        # A test or a tool may have replaced a method, which must then be called.
        if not is_plain(producer) or "_basic_publish" in broker.__dict__:
            return None
        plain_producer: SqlBrokerProducer = producer
        return plain_producer
