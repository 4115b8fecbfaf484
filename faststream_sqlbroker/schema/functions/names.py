"""Names of the functions, and values that the functions of all databases share."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from faststream_sqlbroker.core.checks import MAX_NAME_LENGTH
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import COPIED_COLUMNS, Tables

CLAIMABLE = ", ".join(f"'{s.name}'" for s in MessageState if s in CLAIMABLE_STATES)
MAX_LENGTH = MAX_NAME_LENGTH
MAX_LOAD = 10_000
"""Maximum load of a queue: more workers than that are not started, and a count of ten thousand
entries takes some milliseconds."""
INVALID_QUEUE = "^[.]{1,2}$|(?<![{])[{][a-zA-Z0-9_]+[}](?![}])"
"""The invalid queue names of `core.checks`: steps of a path, and parameters of an address to
FastStream."""
UNCHANGED_COLUMNS = tuple(n for n in COPIED_COLUMNS if n not in {"state", "last_error"})
"""Columns that a cancelled message keeps unchanged in the archive."""
VERSION = 1
"""Version of the functions, stored in the comment of each function."""
COMMENT = f"faststream_sqlbroker functions, version {VERSION}"


@dataclass(frozen=True, slots=True)
class FunctionNames:
    """Names of the functions of a set of tables."""

    publish: str
    publish_bytes: str
    cancel: str
    load: str

    @classmethod
    def from_config(cls, config: SqlBrokerSchemaConfig) -> "FunctionNames":
        """Build `sqlbroker_publish` and so on; for a table of another name, `events_publish`."""
        table = config.message_table_name
        prefix = "sqlbroker" if table == "message" else table
        return cls(*(f"{prefix}_{verb}" for verb in ("publish", "publish_bytes", "cancel", "load")))


NAMES = FunctionNames.from_config(SqlBrokerSchemaConfig())
"""The default names."""


def build_parts(tables: Tables, quote: Callable[[str], str]) -> dict[str, Any]:
    """Return the values for the templates of all databases; `quote` makes SQL of a name."""
    names = asdict(FunctionNames.from_config(tables.config))
    archive = tables.archive
    return {
        **{verb: quote(name) for verb, name in names.items()},
        "message": quote(tables.message.name),
        "policy_state": quote(tables.policy_state.name),
        "archive": "" if archive is None else quote(archive.name),
        "comment": COMMENT,
        "claimable": CLAIMABLE,
        "most": MAX_LOAD,
        "reason": CANCELLED,
    }
