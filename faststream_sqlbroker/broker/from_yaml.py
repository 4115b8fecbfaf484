"""Create a broker from a YAML file."""

from importlib import import_module
from os import PathLike
from typing import Any, Self


class SqlBrokerConfigured:
    """Loads a broker from a YAML file; the required package is imported only then."""

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], **options: Any) -> Self:
        """Create a broker with the queues and schedules of a YAML file, without connecting yet.

        Requires the extra `config`. Queues with `handler` import their functions. More subscribers
        can be declared afterwards, as on any broker.

        Args:
            path: The file.
            options: Arguments of `SqlBroker` that a file cannot contain, such as `metrics`,
                `middlewares` and `logger`.

        Raises:
            SetupError: the file cannot be read, or an option belongs in the file.
            ConfigError: the file has mistakes; the text has the line and column of each.
            MissingExtraError: an extra that the file needs is not installed.
        """
        # Imported by name, because that package imports this module, and is an extra.
        config = import_module("faststream_sqlbroker.config")
        broker: Self = config.read_service(path).broker(cls, options)
        return broker
