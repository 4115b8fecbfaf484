"""Whether a publish with at most a transaction as its option may make its row at once."""

from typing import Any

from faststream.message import gen_cor_id

from faststream_sqlbroker.adapter.broker import BrokerUsecase
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer, is_plain
from faststream_sqlbroker.subscriber.pipeline.fingerprints import (
    GENERIC,
    chosen,
    unknown,
    warn_once,
)
from faststream_sqlbroker.subscriber.pipeline.replaced import PUBLISHING

_STEPS = ("connect", "middlewares", "_basic_publish")
"""What FastStream's broker does for a publish."""


class PlainPublish:
    """Asked before each publish of one broker."""

    def __init__(self) -> None:
        """Nothing may be left out before `look`."""
        self._is_known = False

    def look(self, broker: Any) -> None:
        """Look at what does not change once `broker` is connected.

        Raises:
            SetupError: the environment variable has an unknown value.
        """
        own = all(getattr(type(broker), s) is getattr(BrokerUsecase, s) for s in _STEPS)
        names = unknown(PUBLISHING)
        if names:
            warn_once(PUBLISHING, "FastStream publishes", names, broker._log_of_loops)  # noqa: SLF001
        self._is_known = own and not names and chosen() != GENERIC

    def producer(self, broker: Any) -> SqlBrokerProducer | None:
        """The producer of a publish that nothing but a producer has a part in; None: others do."""
        configs = broker.config.configs
        if not self._is_known or len(configs) != 1 or broker._connection is None:  # noqa: SLF001
            return None
        config = configs[0]
        producer = config.producer
        if config.broker_middlewares or config.id_generator is not gen_cor_id:
            return None
        # A test or a tool may have replaced a method: then it is the one to call.
        if not is_plain(producer) or "_basic_publish" in broker.__dict__:
            return None
        found: SqlBrokerProducer = producer
        return found
