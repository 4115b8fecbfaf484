"""A small shop under load on SQLite, with a dashboard: `./dev dashboard`.

    python -m docs.examples.dashboard_demo [--port 8080]

It is for this machine only, and without users, as `sqlbroker serve --insecure`.
"""

import argparse
import asyncio
import random
import signal
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from faststream_sqlbroker import ConstantRetryStrategy, NoRetryStrategy, SqlBroker
from faststream_sqlbroker.cli.listening import create_server_config, print_address
from faststream_sqlbroker.core.channels import Channels
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.http.local import LocalOnly
from faststream_sqlbroker.http.server import InnerServer

CUSTOMERS = ("ada", "ben", "cleo", "dora")
PAUSE = 0.3
"""Seconds between two orders."""


def shop(url: str, **options: Any) -> SqlBroker:
    """A broker with subscribers that work, are slow, and fail now and then."""
    broker = SqlBroker(url, logger=None, **options)

    @broker.subscriber(
        "orders",
        retry_strategy=ConstantRetryStrategy(delay_seconds=2, max_attempts=2),
    )
    async def order(body: dict[str, Any]) -> None:
        await asyncio.sleep(random.uniform(0.0, 0.2))
        if body["amount"] > 90:
            raise ValueError(f"the card of {body['customer']} was refused")

    @broker.subscriber("emails", policies=[Throttle(30, timedelta(minutes=1))])
    async def email(_body: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)

    @broker.subscriber("invoices", retry_strategy=NoRetryStrategy())
    async def invoice(body: dict[str, Any]) -> None:
        if body["id"] % 7 == 0:
            raise TimeoutError("the printer does not answer")

    broker.publish_on_schedule("nightly report", "30 3 * * 1-5", "reports", {}, tz="Europe/Berlin")
    return broker


async def trade(broker: SqlBroker, number: int) -> None:
    """One order, and what follows from it."""
    customer = random.choice(CUSTOMERS)
    order = {"id": number, "customer": customer, "amount": random.randint(1, 100)}
    await broker.publish(order, "orders", key=customer)
    await broker.publish(order, "emails")
    if number % 3 == 0:
        await broker.publish(order, "invoices")
    if number % 20 == 1:
        # A slip of the name: nothing takes from it.
        await broker.publish(order, "ordres")
        await broker.publish(order, "reports", delay="1h")


async def run(port: int) -> None:
    """Trade and serve until a signal."""
    with tempfile.TemporaryDirectory() as folder:
        broker = shop(f"sqlite+aiosqlite:///{Path(folder) / 'shop.db'}")
        await broker.create_tables()
        served = broker._make_standalone_app(LocalOnly(), Channels())  # noqa: SLF001 - as `serve --insecure`
        config, listener = create_server_config(served, "127.0.0.1", port, {})
        server = InnerServer(config)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await broker.start()
        print_address("127.0.0.1", listener, {})
        trading = asyncio.create_task(_trade(broker))
        await asyncio.wait(
            (serving, trading, asyncio.create_task(stop.wait())),
            return_when=asyncio.FIRST_COMPLETED,
        )
        trading.cancel()
        server.should_exit = True
        await serving
        await broker.stop()


async def _trade(broker: SqlBroker) -> None:
    number = 0
    while True:
        number += 1
        await trade(broker, number)
        await asyncio.sleep(PAUSE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    asyncio.run(run(parser.parse_args().port))
