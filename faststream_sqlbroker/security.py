"""Convert FastStream's security objects to the login and TLS of a database connection."""

import ssl
from typing import Any

from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256
from sqlalchemy import URL

from faststream_sqlbroker.exceptions import NotSupportedError, SetupError

__all__ = ("BaseSecurity", "SASLPlaintext", "SASLScram256", "parse_security")

SSL_CONTEXT_DRIVERS = ("asyncpg", "aiomysql", "asyncmy")
"""Drivers whose `connect` accepts an SSLContext as `ssl`."""


def parse_security(security: BaseSecurity | None, url: URL) -> tuple[URL, dict[str, Any]]:
    """Return `url` with the login of `security`, and the `connect_args` for TLS.

    `use_ssl=True` without an SSLContext trusts the system's certificates; certificate and host name
    are checked.

    Raises:
        SetupError: the database does not support such a login (SQLite has none), or URL and
            security both name a login.
        NotSupportedError: an SSLContext for psycopg, which accepts none.
    """
    if security is None:
        return url, {}
    if url.get_backend_name() == "sqlite":
        raise SetupError(
            "security= is only for database servers, but SQLite is a file: omit it, and restrict "
            "the permissions of the file"
        )
    return _add_login(security, url), _build_tls_args(security, url.get_driver_name())


def _add_login(security: BaseSecurity, url: URL) -> URL:
    """Add the user and the password of `security` to the URL, if there is a login."""
    if type(security) is BaseSecurity:
        return url
    allowed: tuple[type[SASLPlaintext | SASLScram256], ...] = (SASLPlaintext,)
    if url.get_backend_name() == "postgresql":
        allowed = (SASLPlaintext, SASLScram256)
    if not isinstance(security, allowed):
        raise SetupError(
            f"{type(security).__name__} cannot log in to {url.get_backend_name()}: use "
            "SASLPlaintext(username, password), or on PostgreSQL also SASLScram256"
        )
    if url.username or url.password:
        raise SetupError(
            f"the database URL and {type(security).__name__} both name a user: remove the user "
            "from the URL"
        )
    return url.set(username=security.username, password=security.password)


def _build_tls_args(security: BaseSecurity, driver: str) -> dict[str, Any]:
    """Return the driver's arguments for TLS; the certificate is always checked.

    Drivers take TLS in different forms.
    """
    if not security.use_ssl:
        return {}
    if driver in SSL_CONTEXT_DRIVERS:
        return {"ssl": security.ssl_context or ssl.create_default_context()}
    if security.ssl_context is not None:
        raise NotSupportedError(
            f"{driver} accepts no SSLContext: write ?sslmode=verify-full&sslrootcert=ca.pem in the "
            "URL, or pass an AsyncEngine"
        )
    return {"sslmode": "verify-full", "sslrootcert": "system"}
