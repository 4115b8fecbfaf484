"""How the suspects that a claim found are read; statements tell them as `Suspicion.of` does."""

from collections.abc import Iterable, Sequence
from typing import Any

from faststream_sqlbroker.core.suspects import Suspect, Suspicion

_ATTEMPTS = 6
"""Index of attempts_count in `CLAIMED_COLUMNS`."""
_DELIVERIES = 7
"""Index of deliveries_count in `CLAIMED_COLUMNS`."""
_ACQUIRED = 14
"""Index of acquired_at in `CLAIMED_COLUMNS`."""


def statement_end(suspicion: Suspicion | None) -> str:
    """The end of the name of the claim statement for `suspicion`."""
    if suspicion is None:
        return ""
    return "_apart" if suspicion.told else "_others"


def split_suspects(
    rows: Iterable[Sequence[Any]], suspicion: Suspicion | None
) -> tuple[list[Sequence[Any]], dict[int, Suspect]]:
    """The rows that were leased, and by id the suspects, which have no `acquired_at`."""
    if suspicion is None:
        return list(rows), {}
    leased: list[Sequence[Any]] = []
    suspects: dict[int, Suspect] = {}
    for row in rows:
        if row[_ACQUIRED] is not None:
            leased.append(row)
        elif suspicion.told and (suspect := _read(row, suspicion)) is not None:
            suspects[row[0]] = suspect
    return leased, suspects


def _read(row: Sequence[Any], suspicion: Suspicion) -> Suspect | None:
    try:
        return suspicion.of(int(row[_DELIVERIES]), int(row[_ATTEMPTS]))
    except (TypeError, ValueError):  # SQLite keeps any value that another program has written
        return Suspect(suspicion.losses)
