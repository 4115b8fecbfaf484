"""Whether what was found at the start of a subscriber still holds.

FastStream reads its configuration anew for each message, so it may change while the subscriber
runs: a middleware is added, the context cleared, a handler put under test. What cannot be asked
this quickly is refused at the start.
"""

from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

from faststream_sqlbroker.adapter.pipeline import ConfigComposition, default_filter
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from faststream_sqlbroker.subscriber.pipeline.dependencies import Found


class Guard:
    """Asked before each message of one subscriber."""

    __slots__ = (
        *("_calls", "_compositions", "_configs", "_context", "_decoder", "_found", "_handler"),
        *(
            "_item",
            "_leaves",
            "_lock",
            "_own",
            "_parser",
            "_policy",
            "_provider",
            "_scopes",
            "_state",
            "_subscriber",
        ),
        *("_transactional", "_wrapped"),
    )

    def __init__(
        self,
        subscriber: Any,
        scopes: Scopes,
        found: Found,
        own: Collection[str],
        *,
        transactional: bool,
    ) -> None:
        """Remember what `subscriber` has now.

        Args:
            subscriber: Prepared, with one handler.
            scopes: Its context.
            found: The dependencies of its handler.
            own: Names of its methods that a test might replace.
            transactional: Whether each message has a transaction.
        """
        self._subscriber = subscriber
        self._own = frozenset(own)
        self._scopes = scopes
        self._calls = subscriber.calls
        [self._item] = subscriber.calls
        self._parser = self._item.parser
        self._decoder = self._item.decoder
        self._handler = self._item.handler
        self._wrapped = self._handler._wrapped_call
        self._lock = subscriber.lock
        self._policy = subscriber.ack_policy
        self._transactional = transactional
        outer = subscriber._outer_config
        self._context = outer.context
        self._state = outer.logger
        self._compositions, leaves = _parts_of(outer)
        self._leaves = [
            (leaf, leaf.broker_middlewares, list(leaf.broker_middlewares), dict(leaf.extra_context))
            for leaf in leaves
        ]
        self._found = found
        self._provider = outer.fd_config.provider

    def passes(self) -> bool:
        """Whether the next message may go the compiled way."""
        # Before each message: the cheapest questions come first.
        return (
            not self._handler.is_test
            and (current.get() is None) is not self._transactional
            and self.holds()
        )

    def is_passing(self) -> bool:
        """Whether something that does not last asks for FastStream's pipeline: a test, or another
        message's transaction.
        """
        return self._handler.is_test or (current.get() is None) is self._transactional

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return (
            self._same_handler()
            and self._scopes.holds()
            and self._same_configuration()
            and (not self._found or self._same_dependencies())
        )

    def _same_handler(self) -> bool:
        item = self._item
        calls = self._calls.data
        return (
            self._handler._wrapped_call is self._wrapped
            and item.parser is self._parser
            and item.decoder is self._decoder
            and item.filter is default_filter
            and self._subscriber.ack_policy is self._policy
            and len(calls) == 1
            and calls[0] is item
            and self._subscriber.lock is self._lock
            and self._own.isdisjoint(self._subscriber.__dict__)
        )

    def _same_configuration(self) -> bool:
        for composition, configs in self._compositions:
            if composition.configs is not configs:
                return False
        for leaf, middlewares, contents, extra in self._leaves:
            now = leaf.broker_middlewares
            if now is not middlewares or leaf.extra_context != extra:
                return False
            # A list may change in place.
            if (now or contents) and not _same(now, contents):
                return False
        broker = self._leaves[0][0]
        return broker.fd_config.context is self._context and broker.logger is self._state

    def _same_dependencies(self) -> bool:
        # A dependency that was built anew is another model under the same key.
        known = self._provider.dependencies
        return all(known.get(key) is model for key, model in self._found)


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _parts_of(config: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """The compositions in `config`, each with what it is made of, and the configurations in them.

    The first configuration is the broker's.
    """
    if not isinstance(config, ConfigComposition):
        return [], [config]
    compositions: list[tuple[Any, Any]] = [(config, config.configs)]
    leaves: list[Any] = []
    for part in config.configs:
        inner, of_part = _parts_of(part)
        compositions += inner
        leaves += of_part
    return compositions, leaves
