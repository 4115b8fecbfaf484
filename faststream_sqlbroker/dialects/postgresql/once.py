"""The keys of `Once` in one statement that commits by itself: those that no other message has."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Float, String, Text, Uuid, bindparam
from sqlalchemy.dialects.postgresql import ARRAY

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.dialects.once import KEPT, claim_info, delivery_token
from faststream_sqlbroker.dialects.policy_state import ONCE

CLAIM_FREE_KEYS = """
WITH held AS MATERIALIZED (
  SELECT m.id, u.scope, u.key, u.delivery, u.info
  FROM unnest(:ids, :tokens, :scopes, :keys, :deliveries, :infos)
    AS u(id, token, scope, key, delivery, info)
  JOIN {message} m ON m.id = u.id AND m.lease_token = u.token
  ORDER BY m.id FOR UPDATE OF m
)
INSERT INTO {policy_state} (scope, {key}, lease_token, info, created_at, expires_at)
SELECT DISTINCT ON (h.scope COLLATE "C", h.key COLLATE "C") h.scope, h.key, h.delivery,
  h.info::jsonb, statement_timestamp(), statement_timestamp() + :kept * interval '1 second'
FROM held h ORDER BY h.scope COLLATE "C", h.key COLLATE "C", h.id
ON CONFLICT (scope, {key}) DO NOTHING
RETURNING (info->>'message')::bigint
"""
"""Messages first, then keys in sorted order, as `dialects.once` locks them: so the two cannot
deadlock; "C" is Python's order, whatever the database's is. A key that is there, or is inserted by
another at this moment, is left to that."""


def free_key_types() -> Sequence[BindParameter[Any]]:
    """The binds of `CLAIM_FREE_KEYS`."""
    arrays = {
        "ids": BigInteger,
        "tokens": Uuid,
        "scopes": String,
        "keys": String,
        "deliveries": Uuid,
        "infos": Text,
    }
    listed: list[BindParameter[Any]] = [
        bindparam(name, type_=ARRAY(item)) for name, item in arrays.items()
    ]
    return [*listed, bindparam("kept", type_=Float(53))]


def free_key_binds(rows: Sequence[ClaimedMessage], ttl: float, worker: str) -> dict[str, Any]:
    """What `CLAIM_FREE_KEYS` is told of `rows`, which have keys."""
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
