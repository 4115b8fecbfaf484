"""The name of the installed distribution, and others that own files of the package."""

from functools import cache
from importlib.metadata import PathDistribution
from pathlib import Path

DISTRIBUTION = "sqlbroker"
"""What pip installs; the import is `faststream_sqlbroker`."""
_PACKAGE = Path(__file__).parent.parent


@cache
def get_shared_files_warning(package: Path = _PACKAGE) -> str | None:
    """Return a warning if another distribution owns files of this package, else None.

    Two distributions with one import name overwrite each other's files, and pip does not object.
    The records of the distributions in the same folder are read once per process: a few
    milliseconds, which is too much for an import.
    """
    owners = sorted(
        f"{distribution.name} {distribution.version}"
        for distribution in _find_owners(package)
        if distribution.name.lower() != DISTRIBUTION
    )
    if not owners:
        return None
    return (
        f"{' and '.join(owners)} also owns files of the package {package.name!r}: the later "
        f"installation has overwritten files of the earlier. Install {DISTRIBUTION} into its own "
        "environment"
    )


def _find_owners(package: Path) -> list[PathDistribution]:
    """Find the distributions in the package's folder whose RECORD lists files of the package."""
    entry = f"\n{package.name}/".encode()
    return [
        PathDistribution(record.parent)
        for record in package.parent.glob("*.dist-info/RECORD")
        if entry in b"\n" + record.read_bytes()
    ]
