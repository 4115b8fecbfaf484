"""Render the migrations as SQL to migrations/<dialect>/<version>.sql, for those who run them by
hand.

python -m tools.render_migrations [--check]
"""

import sys
from pathlib import Path

from faststream_sqlbroker.schema.functions import VERSION, render_functions
from faststream_sqlbroker.schema.migrate import MIGRATION_DIALECTS, list_versions, render_migrations
from tools.files import report, write_or_compare

FOLDER = Path(__file__).parent.parent / "migrations"
FUNCTIONS = ("postgresql", "mysql")
"""Databases with stored functions; MariaDB's are MySQL's."""


def files() -> dict[Path, str]:
    """What the folder should hold."""
    found: dict[Path, str] = {}
    since: str | None = None
    for version, stem in list_versions().items():
        for name in MIGRATION_DIALECTS:
            found[FOLDER / name / f"{stem}.sql"] = render_migrations(name, since=since, to=version)
        since = version
    for name in FUNCTIONS:
        found[FOLDER / name / f"functions_v{VERSION}.sql"] = render_functions(name)
    return found


if __name__ == "__main__":
    only_check = "--check" in sys.argv
    sys.exit(
        report(
            write_or_compare(files(), FOLDER, check=only_check), "just migrations", check=only_check
        )
    )
