"""What `broker.asgi` and `health_port` take of this package, in one import."""

from faststream_sqlbroker.http.app import HttpApp, HttpOptions, authentication, probe_app
from faststream_sqlbroker.http.server import ProbeServer
from faststream_sqlbroker.http.service import Service

__all__ = ("HttpApp", "HttpOptions", "ProbeServer", "Service", "authentication", "probe_app")
