"""Entries of the audit for actions that end at once."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.parts import jobs


def note_action(
    connection: Connection,
    dialect: Dialect,
    action: str,
    by: str,
    given: Mapping[str, Any],
    done: int = 1,
) -> None:
    """Note who did what on how many, in the transaction that does it, so that the audit is true.

    What is None in `given` is left out.
    """
    arguments = {name: value for name, value in given.items() if value is not None}
    job = Job(action=action, by=by, arguments=arguments, state="ended", expected=done, done=done)
    jobs.add(connection, dialect.tables.policy_state, job, dialect.now(connection))
