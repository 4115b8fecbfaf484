"""The Email service: each user gets only the last e-mail of an hour, rate-limited.

python -m docs.examples.emails.service URL PLAN is one of its processes.
"""

import asyncio
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

from faststream import FastStream
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from docs.examples.emails.records import record_send
from faststream_sqlbroker import Debounce, Pipeline, SqlBroker, SqlBrokerMessage, Step, Throttle

QUEUE, THROTTLED, SENDING = "email", "email.throttle", "email.send"


@dataclass(frozen=True)
class Plan:
    """How much of everything; times in seconds."""

    users: int = 1_000
    publishing: float = 24.0
    """From the first e-mail to the beginning of the last burst."""
    hour: float = 4.0
    minute: float = 2.0
    undo: float = 3.0
    """So long a writer could take an e-mail back: it is published with this delay."""
    lease: float = 5.0
    """What a killed process had in hand comes back after this."""
    rate: int = 100
    """Most e-mails in any minute."""
    together: int = 7
    """Of these, so many may go at the same moment."""
    seed: int = 1
    times: int = 1
    """So many times the traffic: as many users, and e-mails that may go in a minute."""

    @property
    def all_users(self) -> int:
        """To how many users e-mails are written."""
        return self.users * self.times

    @property
    def most(self) -> int:
        """Most e-mails that may go in any minute."""
        return self.rate * self.times

    @property
    def most_together(self) -> int:
        """Of these, so many may go at the same moment."""
        return self.together * self.times

    def dump(self) -> str:
        """For the command line of another process."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "Plan":
        """Of what `dump` gave."""
        return cls(**json.loads(text))


def email_service(broker: SqlBroker, engine: AsyncEngine, plan: Plan) -> Pipeline:
    """Declare the service: two steps that move opaque e-mails on, and the senders behind them."""
    lease: dict[str, Any] = {
        "release_stuck_timeout": plan.lease,
        "release_stuck_interval": "500ms",
    }
    service = broker.pipeline(
        "Email",
        Step(
            QUEUE,
            policies=[Debounce(plan.hour, max_wait=plan.hour)],
            **lease,
        ),
        Step(
            THROTTLED,
            policies=[Throttle(plan.most, per=plan.minute, burst=plan.most_together)],
            max_workers=4,
            fetch_batch_size=plan.most_together,  # a batch is moved when its last slot has come
            **lease,
        ),
        forward_to=SENDING,
    )

    @broker.subscriber(SENDING, max_workers=8, fetch_batch_size=20, flush_batch_size=20, **lease)
    async def send(text: str, message: SqlBrokerMessage) -> None:
        """Talk to the mail server: once the e-mail has left, nothing takes it back, and the process
        may die.
        """
        assert text.startswith(f"to {message.key}: ")
        await asyncio.sleep(random.uniform(0.005, 0.03))
        await record_send(engine, message.raw_message.id, os.getpid())
        await asyncio.sleep(random.uniform(0.005, 0.03))

    return service


async def main(url: str, plan: Plan) -> None:
    """Run until SIGTERM."""
    engine = create_async_engine(url, pool_size=10)
    broker = SqlBroker(engine, logger=None)
    email_service(broker, engine, plan)
    await FastStream(broker, logger=None).run()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Plan.load(sys.argv[2])))
