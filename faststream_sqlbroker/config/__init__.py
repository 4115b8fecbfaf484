"""A service in a YAML file: `pip install "sqlbroker[config]"`, then `SqlBroker.from_yaml`."""

from faststream_sqlbroker.exceptions import MissingExtraError

try:
    from faststream_sqlbroker.config.sections import ServiceConfig, json_schema
    from faststream_sqlbroker.config.service import ConfiguredService, check_service, read_service
except ImportError as error:
    if error.name is None or error.name.split(".")[0] != "yaml":
        raise
    msg = "a YAML file needs PyYAML, which is not installed: pip install 'sqlbroker[config]'"
    raise MissingExtraError(msg) from error

__all__ = ("ConfiguredService", "ServiceConfig", "check_service", "json_schema", "read_service")
