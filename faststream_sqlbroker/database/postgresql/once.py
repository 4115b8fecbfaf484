"""The keys of `Once` in one statement that commits by itself: those that no other message has."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.once import KEPT, claim_info, delivery_token
from faststream_sqlbroker.database.parts.policy_state import ONCE


def free_key_binds(rows: Sequence[ClaimedMessage], ttl: float, worker: str) -> dict[str, Any]:
    """The binds of `claim_free_keys` for `rows`, which have keys."""
    return {
        "ids": [row.id for row in rows],
        "tokens": [row.lease_token for row in rows],
        "scopes": [ONCE + row.queue for row in rows],
        "keys": [row.policy_key for row in rows],
        "deliveries": [delivery_token(row) for row in rows],
        "infos": [json.dumps(claim_info(row, ttl, worker)) for row in rows],
        "kept": ttl + KEPT,
    }


def read_claimed_keys(rows: Iterable[Sequence[Any]]) -> set[int]:
    """The messages whose keys were claimed."""
    return {row[0] for row in rows}
