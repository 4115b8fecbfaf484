"""Other options from one deployment to the next, and both side by side: no message is lost that the
new policy would deliver."""

from collections.abc import Sequence

import pytest

from faststream_sqlbroker.core.policies import Debounce, KeepLast, Policy, Throttle
from tests.policies.covering import pairs
from tests.policies.world import World, outcome

SECOND = 1_000_000
TENTH = SECOND // 10
PER_KEY: list[Policy] = [
    Debounce("1s"),
    Debounce("4s"),
    Debounce("1s", max_wait="2s"),
    Debounce("1s", edge="leading"),
    Debounce("3s", edge="leading"),
    KeepLast("1s"),
    KeepLast("3s"),
]
STEPS: Sequence[Sequence[int]] = ([4, 4, 4, 4, 4, 4], [0, 0, 12, 3, 0, 15], [9, 11, 9, 11, 0])
"""Tenths of a second between the messages of a key."""


class Story:
    """Messages of one key, and who has claimed which."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.delivered: list[int] = []

    def claim(self, policy: Policy, process: int) -> None:
        """A process claims, and its handlers end at once."""
        self.world.policies = [policy]
        rows = self.world.claim(process, 20).rows
        self.world.settle_all([(row, outcome("ack", 0)) for row in rows])
        self.delivered += [row.id for row in rows]

    def play(self, steps: Sequence[int], policies: Sequence[Policy]) -> list[int]:
        """Publish; after each message the next of `policies` claims, by a process of its own."""
        ids = []
        for n, step in enumerate(steps):
            ids.append(self.world.put("a"))
            policy = policies[n % len(policies)]
            self.claim(policy, n % len(policies))
            self.world.advance(step * TENTH)
            self.claim(policy, n % len(policies))
        return ids

    def end(self, policy: Policy) -> None:
        """Until all is quiet."""
        for _ in range(9):
            self.world.advance(2 * SECOND)
            self.claim(policy, 0)
            if not self.world.live():
                return
        pytest.fail(f"there is something left: {self.world.live()}")


def is_leading(policy: Policy) -> bool:
    return isinstance(policy, Debounce) and policy.edge == "leading"


def each_is_delivered_or_replaced(story: Story, ids: Sequence[int]) -> None:
    gone = {i: row for i, row in story.world.archived().items() if row["state"] == "DISCARDED"}
    assert sorted([*story.delivered, *gone]) == list(ids)
    for message_id, row in gone.items():
        assert row["reason"] == "superseded"
        by = row["related_id"]
        while by in gone:
            assert gone[by]["related_id"] != by
            by = gone[by]["related_id"]
        assert by in story.delivered, f"nothing was delivered in place of {message_id}"


def test_bursts_survive_every_change_of_their_policy(world: World, database: str) -> None:
    """SQLite tries every pair, and each server every policy before and after another one
    (`covering`)."""
    for n, (old, new) in enumerate(pairs(PER_KEY, database)):
        a_deployment_loses_no_message(world, old, new, STEPS[n % len(STEPS)])
        processes_side_by_side_lose_no_message(world, old, new)


def test_the_lower_rate_holds_while_both_take_slots(world: World) -> None:
    """And a minute after the last slot of the lower one the other rate holds."""
    for key in (False, True):
        low, high = (Throttle(rate, per="10s", key=key) for rate in (2, 6))
        world.begin([low])
        story = Story(world)
        world.put_many(60, "a")
        story.claim(low, 0)
        assert len(story.delivered) == 2
        for _ in range(9):
            world.advance(SECOND)
            story.claim(high, 1)
        assert len(story.delivered) == 2, "the lower rate was exceeded"
        world.advance(2 * SECOND)
        story.claim(high, 1)
        assert len(story.delivered) == 4
        world.advance(60 * SECOND)
        story.claim(high, 1)
        assert len(story.delivered) == 10


def a_deployment_loses_no_message(
    world: World, old: Policy, new: Policy, steps: Sequence[int]
) -> None:
    world.begin([old])
    story = Story(world)
    before = story.play(steps[: len(steps) // 2], [old])
    after = story.play(steps[len(steps) // 2 :], [new])
    story.end(new)
    each_is_delivered_or_replaced(story, [*before, *after])
    if not is_leading(new):
        assert after[-1] in story.delivered, f"{old} to {new} lost the newest"
    elif not is_leading(old):
        # The newest before was to be delivered at the end of its burst; so was nothing after it.
        assert set(story.delivered) & set(before)


def processes_side_by_side_lose_no_message(world: World, old: Policy, new: Policy) -> None:
    world.begin([old])
    story = Story(world)
    ids = story.play([3, 2, 5, 1, 8, 2], [old, new])
    story.end(new)
    each_is_delivered_or_replaced(story, ids)
    if not is_leading(old) and not is_leading(new):
        assert ids[-1] in story.delivered
