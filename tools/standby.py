"""A private standby, which follows a private PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tools.private import POSTGRESQL_PLACES, Process, folder_of, needed, run, serving


@contextmanager
def standby(primary: str, **settings: str) -> Iterator[tuple[str, Process]]:
    """A standby that follows the private PostgreSQL of the URL `primary`."""
    backup = needed("pg_basebackup", "postgresql", *POSTGRESQL_PLACES)
    target = psycopg.conninfo.conninfo_to_dict(primary.replace("+psycopg", ""))
    with folder_of("postgres") as (folder, become):
        data = folder / "data"
        place = ["-h", str(target["host"]), "-p", str(target["port"]), "-U", str(target["user"])]
        run([backup, *place, "-D", str(data), "-R", "-c", "fast", "--no-sync"], become, folder)
        with serving(data, become, settings) as served:
            yield served
