"""Which rows of which database a state on disk belongs to: one of other rows is refused."""

from collections.abc import Mapping
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import Address
from pyspark_sqlbroker.load.selection import Selection


def describe_source(address: Address, selection: Selection, name: str | None) -> dict[str, Any]:
    """Which rows of which table, without user and password.

    Args:
        address: Of the database.
        selection: Its times do not count.
        name: In place of host, port and database.
    """
    url = address.python_url
    place = address.database
    if address.kind != "sqlite":
        place = f"{url.host}:{url.port}/{place}"
    return {
        "kind": address.kind,
        "database": name or place,
        "schema": selection.schema,
        "table": selection.table,
        "queues": None if selection.queues is None else sorted(set(selection.queues)),
        "states": None if selection.states is None else sorted(set(selection.states)),
    }


def refuse_other_rows(
    what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], advice: str
) -> None:
    """Check that what is on disk is of the rows that are asked for.

    Args:
        what: Is on disk, with its path.
        theirs: The source that it has recorded.
        ours: The source that is asked for.
        advice: What to do where they differ.

    Raises:
        SetupError: they differ.
    """
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise SetupError(
                f"{what} of other rows: its {key} is {theirs.get(key)!r} and here it is {value!r}; "
                f"{advice} (and source= where one database has several addresses)"
            )
