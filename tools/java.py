"""Install what Spark needs on this machine: Java and JDBC drivers."""

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.drivers import require_jar, require_java
from tools.packages import JAVA, install

DRIVERS = {
    "postgresql": "libpostgresql-jdbc-java",
    "mysql": "libmariadb-java",
    "sqlite": "libxerial-sqlite-jdbc-java",
}
"""By kind of database, Debian's package of its driver; MariaDB's is `mysql`."""


def install_spark(*kinds: str) -> str | None:
    """Install Java and the drivers of `kinds` if they are missing.

    Return the reason if one of them cannot be had, or None.
    """
    errors = []
    for package in (None, JAVA, *(DRIVERS[kind] for kind in kinds)):
        if package is not None:
            errors.append(install(package) or "")
        try:
            require_java()
            for kind in kinds:
                require_jar(kind)
        except SetupError as error:
            errors.append(str(error))
        else:
            return None
    return "; ".join(error for error in errors if error)
