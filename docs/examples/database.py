"""An empty database for an example."""

import os
import sys
from pathlib import Path

from sqlalchemy import create_engine, text

from tools.servers import VARIABLES


def empty_database(kind: str, folder: str, name: str) -> str:
    """The URL of an example's own, empty database `name`: a file in `folder`, or on the server of
    the tests.
    """
    if kind == "sqlite":
        return f"sqlite+aiosqlite:///{Path(folder) / name}.db"
    variable = VARIABLES["postgresql"]
    if kind != "postgresql":
        sys.exit(f"there is no {name} on {kind!r}: choose sqlite or postgresql")
    if variable not in os.environ:
        sys.exit(
            os.environ.get(
                f"{variable}_MISSING", f"set {variable}, or run `just {name} postgresql`"
            )
        )
    admin = create_engine(os.environ[variable], isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE IF EXISTS sqlbroker_{name}"))
        connection.execute(text(f"CREATE DATABASE sqlbroker_{name}"))
    admin.dispose()
    url = admin.url.set(drivername="postgresql+asyncpg", database=f"sqlbroker_{name}")
    return url.render_as_string(hide_password=False)
