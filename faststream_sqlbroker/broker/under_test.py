"""`drain` and `outbox` of a broker under `TestSqlBroker`."""

from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.testing.reports import Drained, Published


class SqlBrokerUnderTest:
    """Methods of a broker that work only in tests."""

    _under_test: Any = None

    async def drain(self, *, raise_errors: bool = False) -> "Drained":
        """Under TestSqlBroker: deliver due messages until none is left.

        Waits for deliveries started by publishes of committed transactions, and does not advance
        time.

        Args:
            raise_errors: Raise the errors that handlers have raised since the last `drain`, except
                those that a `publish` has raised already; several errors as one group.

        Returns:
            The runs since the last `drain`, the failed runs, and the messages that still wait.

        Raises:
            SetupError: the broker is not under TestSqlBroker, or a handler calls this method.
            TimeoutError: a handler took more than 5 seconds; the text names it.
        """
        drained: Drained = await self._get_pump("drain").drain(raise_errors=raise_errors)
        return drained

    def outbox(self, queue: str | None = None) -> "list[Published]":
        """Under TestSqlBroker: return the published messages, handled or not, in order.

        Args:
            queue: The full name of a queue; None returns the messages of all queues.

        Raises:
            SetupError: the broker is not under TestSqlBroker.
        """
        published: list[Published] = self._get_pump("outbox").outbox(queue)
        return published

    def _get_pump(self, method: str) -> Any:
        """Return the `Pump`, which delivers messages in a test; `method` is named in the error."""
        if self._under_test is None:
            raise SetupError(
                f"{method} is for tests: call it inside `async with TestSqlBroker(broker)`"
            )
        return self._under_test
