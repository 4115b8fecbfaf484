"""Partitions of a PostgreSQL archive that is partitioned by range of `archived_at`: found, detached, dropped.

A partition is detached first, then compared, then dropped or attached again: once it is detached nobody can
add to it. A comment on it says what is under way, so that the next prune ends it if this one dies.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.spark.databases import Database
from faststream_sqlbroker.spark.figures import Figures, from_json
from faststream_sqlbroker.spark.selection import Selection

_BOUNDS = re.compile(r"FOR VALUES FROM \('([^']+)'\) TO \('([^']+)'\)")
_MARK = "faststream_sqlbroker prune: "

_PARTITIONS = """
SELECT c.oid::regclass::text, pg_get_expr(c.relpartbound, c.oid), i.inhdetachpending,
  obj_description(c.oid, 'pg_class'), p.partdefid <> 0
FROM pg_partitioned_table p
JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0] AND a.attname = 'archived_at'
JOIN pg_inherits i ON i.inhparent = p.partrelid
JOIN pg_class c ON c.oid = i.inhrelid AND c.relkind = 'r'
WHERE p.partrelid = {table} AND p.partstrat = 'r' AND p.partnatts = 1
ORDER BY 1
"""
_DETACHED = """
SELECT c.oid::regclass::text, d.description FROM pg_description d
JOIN pg_class c ON c.oid = d.objoid AND d.classoid = 'pg_class'::regclass AND d.objsubid = 0
WHERE NOT c.relispartition AND starts_with(d.description, {mark}) ORDER BY 1
"""


@dataclass(frozen=True)
class Partition:
    """A leaf of the archive.

    Attributes:
        name: As SQL takes it.
        bounds: PostgreSQL's own words.
        start: Its first moment.
        end: The first moment that does not belong to it.
        with_default: Whether the archive has a default partition, which makes CONCURRENTLY impossible.
    """

    name: str
    bounds: str
    start: datetime
    end: datetime
    with_default: bool


class Partitions:
    """The partitions of one archive; none where it is a plain table, or on another database."""

    def __init__(self, database: Database, connection: Connection, selection: Selection) -> None:
        self._database, self._connection = database, connection
        self._parent = selection.name(database)
        self.possible = database.kind == "postgresql" and selection.queues is None
        if self.possible:
            connection.exec_driver_sql("SET TimeZone = 'UTC'")
            connection.exec_driver_sql("SET DateStyle = 'ISO'")

    def find(self) -> list[Partition]:
        """Those with a begin and an end."""
        if not self.possible:
            return []
        found = []
        for name, bounds, pending, _, default in self._rows():
            match = _BOUNDS.fullmatch(bounds or "")
            if match is not None and not pending:
                start, end = (datetime.fromisoformat(text) for text in match.groups())
                found.append(Partition(name, bounds, start, end, default))
        return found

    def drop(self, partition: Partition, expected: Figures) -> bool:
        """Detach it and drop it; False if it had other rows than expected, and is attached again."""
        note = {"parent": self._parent, "bounds": partition.bounds, "figures": expected.to_json()}
        words = self._database.text(_MARK + json.dumps(note))
        self._run(f"COMMENT ON TABLE {partition.name} IS {words}")
        if partition.with_default:
            self._run("SET lock_timeout = '10s'")  # the whole archive is locked: better later than long
            self._run(f"ALTER TABLE {self._parent} DETACH PARTITION {partition.name}")
            self._run("RESET lock_timeout")
        else:
            self._run(f"ALTER TABLE {self._parent} DETACH PARTITION {partition.name} CONCURRENTLY")
        return self._end(partition.name, partition.bounds, expected)

    def resume(self) -> None:
        """End what a prune that died has begun."""
        if not self.possible:
            return
        for name, _, pending, comment, _ in self._rows():
            if pending and (comment or "").startswith(_MARK):
                self._run(f"ALTER TABLE {self._parent} DETACH PARTITION {name} FINALIZE")
        mark = self._database.text(_MARK)
        for name, comment in self._connection.exec_driver_sql(_DETACHED.format(mark=mark)).all():
            note = json.loads(comment.removeprefix(_MARK))
            if note["parent"] == self._parent:
                self._end(name, note["bounds"], from_json(note["figures"]))

    def _end(self, name: str, bounds: str, expected: Figures) -> bool:
        """Drop a detached partition, or attach it again."""
        if self._figures(name) == expected:
            self._run(f"DROP TABLE {name}")
            return True
        self._run(f"ALTER TABLE {self._parent} ATTACH PARTITION {name} {bounds}")
        self._run(f"COMMENT ON TABLE {name} IS NULL")
        return False

    def _figures(self, name: str) -> Figures:
        time = self._database.microseconds("archived_at")
        sums = ", ".join(self._database.exact_sum(one) for one in ("id", time))
        row = self._connection.exec_driver_sql(f"SELECT count(*), {sums} FROM {name}").one()
        return Figures(*(int(value) for value in row))

    def _rows(self) -> Sequence[Any]:
        table = f"to_regclass({self._database.text(self._parent)})"
        return self._connection.exec_driver_sql(_PARTITIONS.format(table=table)).all()

    def _run(self, statement: str) -> None:
        self._connection.exec_driver_sql(statement)
