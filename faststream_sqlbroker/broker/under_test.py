"""`drain` and `outbox`: what a test asks of a broker under `TestSqlBroker`."""

from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.testing.reports import Drained, Published


class SqlBrokerUnderTest:
    """What only a test can ask of a broker."""

    _under_test: Any = None

    async def drain(self, *, raise_errors: bool = False) -> "Drained":
        """Under TestSqlBroker: deliver all that is due, until nothing is.

        It waits for what publishes of committed transactions have begun, and does not move time.

        Args:
            raise_errors: Raise what handlers have raised since the last `drain`, unless a `publish`
                has raised it already; several errors as one group.

        Returns:
            What ran since the last `drain`, what of it has failed, and what still waits.

        Raises:
            SetupError: the broker is not under TestSqlBroker, or a handler calls it.
            TimeoutError: a handler took more than 5 seconds; the text names it.
        """
        drained: Drained = await self._asked("drain").drain(raise_errors=raise_errors)
        return drained

    def outbox(self, queue: str | None = None) -> "list[Published]":
        """Under TestSqlBroker: the messages that were published, handled or not, in order.

        Args:
            queue: Its full name; None gives those of all queues.

        Raises:
            SetupError: the broker is not under TestSqlBroker.
        """
        published: list[Published] = self._asked("outbox").outbox(queue)
        return published

    def _asked(self, method: str) -> Any:
        if self._under_test is None:
            raise SetupError(
                f"{method} is for tests: call it inside of `async with TestSqlBroker(broker)`"
            )
        return self._under_test
