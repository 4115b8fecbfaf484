"""What policies have to say about a message that waits: each brings a function of its own."""

from collections.abc import Callable

from faststream_sqlbroker.core.status import Reason, WaitingMessage
from faststream_sqlbroker.database.explain import policies
from faststream_sqlbroker.database.explain.facts import PolicyFacts

Explain = Callable[[PolicyFacts, WaitingMessage], list[Reason]]
"""Gets what the policies of the message's queue know, and the message; only reads."""

EXPLAINERS: list[Explain] = [
    policies.window,
    policies.burst,
    policies.newest,
    policies.slot,
    policies.concurrency,
    policies.once,
]
"""In the order in which their reasons are listed."""


def policy_reasons(facts: PolicyFacts, message: WaitingMessage) -> list[Reason]:
    """Why policies keep `message` from its handler; nothing if they do not, or if it stands by."""
    if policies.is_standing(message):
        return []
    return [reason for explain in EXPLAINERS for reason in explain(facts, message)]
