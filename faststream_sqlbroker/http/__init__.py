"""The broker over HTTP: `pip install "sqlbroker[http]"`, then `broker.asgi(...)`.

`Login`, `BasicAuth` and `ProxyAuth` authenticate users; `hash_password` creates the hash of a
`Login`.
"""

from faststream_sqlbroker.exceptions import MissingExtraError

try:
    from faststream_sqlbroker.core.channels import Channel, Channels, Consumer, Queues, QueueTokens
    from faststream_sqlbroker.http.app import HttpApp
    from faststream_sqlbroker.http.basic_auth import BasicAuth, Login, hash_password
    from faststream_sqlbroker.http.proxies import ProxyAuth
    from faststream_sqlbroker.http.users import Role, User
except ImportError as error:
    missing = (error.name or "").split(".")[0]
    if missing not in {"fastapi", "starlette", "jinja2", "markupsafe"}:
        raise
    msg = f"HTTP needs '{missing}', which is not installed: pip install 'sqlbroker[http]'"
    raise MissingExtraError(msg) from error

__all__ = (
    "BasicAuth",
    "Channel",
    "Channels",
    "Consumer",
    "HttpApp",
    "Login",
    "ProxyAuth",
    "QueueTokens",
    "Queues",
    "Role",
    "User",
    "hash_password",
)
