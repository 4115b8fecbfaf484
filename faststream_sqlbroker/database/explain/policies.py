"""Why each policy makes a message wait. The facts are those of one snapshot."""

from datetime import timedelta

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    KeepLast,
    Once,
    Policy,
    Throttle,
)
from faststream_sqlbroker.core.policies.flags import BURST, HELD_DELAY, PUT_OFF
from faststream_sqlbroker.core.policies.options import MICROSECONDS, seconds
from faststream_sqlbroker.core.policies.standby import STANDBY, chosen_for, stands_by
from faststream_sqlbroker.core.status import Reason, WaitingMessage, moment_text
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.explain.facts import PolicyFacts
from faststream_sqlbroker.database.policies.rows import Live


def delay(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether it waits for its delay. Later policies, and retries, have due times of their own."""
    delays = facts.policies(Delay)
    if (
        not delays
        or not message.policy_marks & HELD_DELAY
        or message.next_attempt_at <= message.now
    ):
        return []
    until = message.next_attempt_at
    words = f"it is not due before {moment_text(until, message.now)}, by {delays[0]}"
    return [Reason("delayed", words, until=until, policy=str(delays[0]))]


def standby(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether another message of its key is to be delivered in its place."""
    if not is_standing(message):
        return []
    again = max(message.now, message.next_attempt_at - timedelta(microseconds=STANDBY))
    bursts, live = ([], {}) if message.key is None else facts.standby(message.key)
    policies: list[Debounce | KeepLast] = [*facts.policies(Debounce), *facts.policies(KeepLast)]
    by = chosen_for(bursts, message.id, leading=any(policy.leading for policy in policies))
    policy = str(policies[0]) if policies else None
    if by is None or by not in live:
        words = (
            "another message of its key was to be delivered in its place; it is looked at again "
            f"at {moment_text(again, message.now)}"
        )
        return [Reason("in_burst", words, message_id=by, until=again, policy=policy)]
    until = from_microseconds(live[by].due)
    words = (
        f"message {by} of its key is delivered in its place, which is due at "
        f"{moment_text(until, message.now)}; if that one cannot be, this one goes"
    )
    return [Reason("in_burst", words, message_id=by, until=until, policy=policy)]


def is_standing(message: WaitingMessage) -> bool:
    """Whether it stands by; then only `standby` says why it waits."""
    return stands_by(to_microseconds(message.next_attempt_at), message.policy_marks)


def window(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether every live subscriber is outside of its window."""
    if facts.closed is None:
        return []
    closed, opens = facts.closed
    until = from_microseconds(opens)
    words = f"it is outside of {closed}, which opens at {moment_text(until, message.now)}"
    return [Reason("outside_window", words, until=until, policy=str(closed))]


def burst(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether its burst goes on, or another message of its key comes first."""
    debounces = facts.policies(Debounce)
    if message.key is None or not message.policy_marks & BURST or not debounces:
        return []
    bursts, live = facts.bursts(message.key)
    turn = bursts.next(set(live))
    if turn is not None and turn != message.id:
        return [_behind(facts, message.key, turn, live[turn], debounces[0])]
    if message.id == bursts.newest and message.next_attempt_at > message.now:
        words = (
            "it is the newest message of a burst of its key, which ends at "
            f"{moment_text(message.next_attempt_at, message.now)} if no other comes"
        )
        return [Reason("in_burst", words, until=message.next_attempt_at, policy=str(debounces[0]))]
    return []


def newest(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether another message of its key runs, or its window goes on."""
    policies = facts.policies(KeepLast)
    if message.key is None or not message.policy_marks & BURST or not policies:
        return []
    latest, live = facts.newest(message.key)
    running = next((i for i, known in live.items() if known.state == "PROCESSING"), None)
    if running is not None and running != message.id:
        return [_behind(facts, message.key, running, live[running], policies[0])]
    if message.id == latest.newest and message.next_attempt_at > message.now:
        words = (
            "it is the newest message of its key, which may have the next at "
            f"{moment_text(message.next_attempt_at, message.now)}"
        )
        return [Reason("in_burst", words, until=message.next_attempt_at, policy=str(policies[0]))]
    return []


def _behind(facts: PolicyFacts, key: str, other: int, known: Live, policy: Policy) -> Reason:
    """It waits until the message `other` of its key has settled."""
    token = next((each.token for each in facts.leases(key) if each.id == other), None)
    name = facts.worker(token)
    doing = f"{name} has it" if name else f"it is {known.state}"
    words = f"message {other} of its key comes first, and it waits until that has settled: {doing}"
    return Reason("key_held", words, message_id=other, worker=name, policy=str(policy))


def slot(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether there is no slot for it yet; the throttle with the latest slot first."""
    throttles = facts.policies(Throttle)
    if not throttles:
        return []
    if message.policy_marks & PUT_OFF and message.next_attempt_at > message.now:
        own = next((each for each in throttles if each.when_exceeded != "wait"), throttles[0])
        until = message.next_attempt_at
        words = f"it asks for a slot of {own} again at {moment_text(until, message.now)}"
        return [Reason("throttled", words, until=until, policy=str(own))]
    found = []
    for throttle, slots in [*facts.next_slots, *facts.key_slots(message.key)]:
        until = from_microseconds(slots.next)
        words = f"every slot of {throttle} is taken until {moment_text(until, message.now)}"
        words += _rate_left(throttle, slots.lag)
        found.append(Reason("throttled", words, until=until, policy=str(throttle)))
    return found


def _rate_left(throttle: Throttle, lag: int) -> str:
    """What the lateness of starts leaves of the rate, if that is less than nearly all."""
    if lag * 20 < throttle.per:
        return ""
    left = throttle.rate * throttle.per / (throttle.per + lag)
    return (
        f"; starts come up to {lag / MICROSECONDS:.2f} s after their slots, which leaves "
        f"{left:.3g} of {throttle.rate} in {seconds(throttle.per)}"
    )


def concurrency(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether as many messages are leased as may be."""
    found = []
    for policy in facts.policies(Concurrency):
        limit = policy.limit
        if policy.per_key:
            leases = [] if message.key is None else facts.leases(message.key)
            first = leases[0] if len(leases) >= limit else None
        elif (scope := policy.scope) is not None:
            if facts.running_of(scope, limit) >= limit:
                words = f"{limit} of {limit} leases of the scope {scope!r} are taken ({policy})"
                found.append(Reason("concurrency", words, policy=str(policy)))
            continue
        else:
            first = facts.first_lease if facts.running(limit) >= limit else None
        if first is None:
            continue
        name = facts.worker(first.token)
        whose = "its key" if policy.per_key else "the queue"
        words = (
            f"{limit} of {limit} leases of {whose} are taken ({policy}): "
            f"message {first.id} is held by {name or 'a subscriber that is not listed'}"
        )
        code = "key_held" if policy.per_key else "concurrency"
        found.append(Reason(code, words, message_id=first.id, worker=name, policy=str(policy)))
    return found


def once(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Whether its key has been claimed already."""
    policies = facts.policies(Once)
    state = None if message.key is None or not policies else facts.claimed(message.key)
    if state is None:
        return []
    ends = state.created_at + timedelta(seconds=state.info["ttl"])
    started_here = (
        state.info["message"] == message.id and message.deliveries_count > message.attempts_count
    )
    if ends <= message.now and not started_here:
        return []
    other = state.info["message"]
    until = moment_text(ends, message.now)
    if other == message.id:
        words = (
            "its handler was started before, and it is not known how far it got: "
            "the next claim makes the message FAILED"
        )
        return [Reason("unknown_outcome", words, policy=str(policies[0]))]
    words = (
        f"its key was claimed by message {other}, until {until}: "
        "the next claim discards it as a duplicate"
    )
    return [Reason("duplicate", words, message_id=other, policy=str(policies[0]))]
