"""A broker from a file of YAML."""

from importlib import import_module
from os import PathLike
from typing import Any, Self


class SqlBrokerConfigured:
    """Reads files; the package that does it is imported only then."""

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], **options: Any) -> Self:
        """A broker with the queues and schedules of a file; it does not connect yet.

        The extra `config` reads the file. Queues with `handler` import their functions. More
        subscribers may be declared afterwards, as on any broker.

        Args:
            path: The file.
            options: Arguments of `SqlBroker` that a file cannot have, such as `metrics`,
                `middlewares` and `logger`.

        Raises:
            SetupError: the file cannot be read, or an option belongs into the file.
            ConfigError: the file has mistakes; the text has the line and column of each.
            MissingExtraError: an extra that the file needs is not installed.
        """
        # By its name: that package imports this one, and is an extra.
        config = import_module("faststream_sqlbroker.config")
        made: Self = config.read_service(path).broker(cls, options)
        return made
