"""Keys without due messages keep no claim from finding out when the next message may start."""

from faststream_sqlbroker.core.policies import Throttle
from tests.policies.world import World, outcome

SECOND = 1_000_000
KEYS = 400
LIMIT = 50


def deliver(world: World) -> tuple[int, float | None]:
    """A claim whose handlers end at once: the number of messages, and when to claim again."""
    claim = world.claim(0, LIMIT)
    world.settle_all([(row, outcome("ack", 0)) for row in claim.rows])
    return len(claim.rows), claim.next_claim_in


def test_many_idle_keys_let_the_subscriber_rest(world: World) -> None:
    """All of them may start a message at once, and have none; one key waits for its next slot."""
    world.begin([Throttle(2, per="1h", key=True)])
    world.put_each([f"idle{n}" for n in range(KEYS)])
    delivered = 0
    for _ in range(2 * KEYS // LIMIT):
        delivered += deliver(world)[0]
        world.advance(SECOND)
    assert delivered == KEYS
    world.put_many(30 * LIMIT, "hot")
    waits = []
    for _ in range(4 * KEYS // LIMIT):
        waits.append(deliver(world)[1])
        world.advance(SECOND // 10)
    assert max(wait for wait in waits if wait is not None) > 3_000, waits
