"""What the functions of all databases have in common."""

from faststream_sqlbroker.core.checks import LONGEST_NAME
from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.schema.tables import Tables

CLAIMABLE = ", ".join(f"'{s.name}'" for s in MessageState if s in CLAIMABLE_STATES)
LONGEST = LONGEST_NAME
MOST_LOAD = 10_000
"""Where the load of a queue ends: more workers than that are not started, and a count of ten
thousand entries takes some milliseconds."""
TEMPLATE = "(?<![{])[{][a-zA-Z0-9_]+[}](?![}])"
"""As in `core.checks`: what FastStream takes for a parameter of an address."""
_OWN = {"state", "last_error"}


def copied_columns(tables: Tables) -> list[str]:
    """The columns that a cancelled message takes into the archive unchanged."""
    if tables.archive is None:
        return []
    live = tables.message.columns
    return [c.name for c in tables.archive.columns if c.name in live and c.name not in _OWN]
