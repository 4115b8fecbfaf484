"""Read by type checkers only: what is wrong is an error, else its `ignore` is one."""

from faststream_sqlbroker import SqlBroker


async def wrong_options(broker: SqlBroker) -> None:
    broker.subscriber("q", max_worker=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    broker.subscriber("q", max_workers="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    broker.publisher(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await broker.publish("x", "q", prioriti=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
