"""A service that a file of YAML describes: read, checked, and made; each queue that it names is
there.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from faststream_sqlbroker.broker.broker import SqlBroker
from faststream_sqlbroker.broker.router import SqlBrokerRouter
from faststream_sqlbroker.config.document import Document, Path, read_document
from faststream_sqlbroker.config.fields import NEEDED, UNKNOWN, first_name
from faststream_sqlbroker.config.models import (
    CODE_OPTIONS,
    HTTP_OPTIONS,
    HttpSection,
    ServiceConfig,
)
from faststream_sqlbroker.config.plain import either
from faststream_sqlbroker.core.channels import Channels, queue_of
from faststream_sqlbroker.core.checks import nearest
from faststream_sqlbroker.core.imports import imported
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.http import HttpApp


B = TypeVar("B", bound=SqlBroker)


class Service:
    """What a file describes; no connection is made."""

    def __init__(self, document: Document, config: ServiceConfig) -> None:
        """`document` has the places of all that is in `config`."""
        self.config = config
        self._document = document

    def broker(self, kind: type[B], options: Mapping[str, Any]) -> B:
        """A broker with the file's subscribers and schedules.

        Args:
            kind: `SqlBroker`, or a class from it.
            options: What only code can give.

        Raises:
            SetupError: an option is not among `CODE_OPTIONS`.
            ConfigError: a queue, a schedule or an option of the broker is not valid.
            MissingExtraError: the file wants metrics, and the extra `prometheus` is not installed.
        """
        for name in options:
            if name not in CODE_OPTIONS or name == "engine":
                raise SetupError(
                    f"from_yaml takes no option {name!r}: write it below broker in the file; there "
                    f"are {', '.join(CODE_OPTIONS[1:])}"
                )
        given = self.config.broker.given()
        url = given.pop("url")
        if given.pop("metrics", False) and "metrics" not in options:
            given["metrics"] = _metrics()
        routers = (*options.get("routers", ()), self._router())
        arguments = {**given, **options, "routers": routers}
        made: B | None = self._try(("broker",), kind, url, **arguments)
        self._document.check()
        assert made is not None  # noqa: S101 - else a mistake was noted
        return made

    def application(self, broker: SqlBroker) -> "HttpApp":
        """What the section `http` describes, for a broker of this service.

        Raises:
            ConfigError: it does not say who may ask, or a user or an option is not valid.
            MissingExtraError: the extra `http` is not installed.
        """
        http = self.config.http
        ways = [] if http is None else self._ways(http)
        self._document.check()
        if http is None or not ways:
            self._document.note(("http",), "HTTP needs authentication: give users or proxy_auth")
        self._document.check()
        section = {} if http is None else http.given()
        options = {name: section[name] for name in HTTP_OPTIONS if name in section}
        made: HttpApp = self._try(("http",), broker.asgi, ways, **options)
        self._document.check()
        return made

    def _ways(self, section: HttpSection) -> list[Any]:
        """Who may ask; mistakes are noted."""
        from faststream_sqlbroker import http  # noqa: PLC0415 - an extra

        logins = [
            self._try(("http", "users", n), http.Login, **user.given())
            for n, user in enumerate(section.users)
        ]
        ways: list[Any] = []
        if logins and None not in logins:
            ways.append(self._try(("http", "users"), http.BasicAuth, logins))
        if (proxy := section.proxy_auth) is not None:
            ways.append(self._try(("http", "proxy_auth"), http.ProxyAuth, **proxy.given()))
        return ways

    def _router(self) -> SqlBrokerRouter:
        """The subscribers and schedules; mistakes are noted."""
        router = SqlBrokerRouter()
        for name, section in self.config.queues.items():
            options = section.given()
            handler = options.pop("handler", None)
            path = ("queues", name)
            subscriber = self._try(path, router.subscriber, name, **options)
            if subscriber is None or handler is None:
                continue
            function = self._try((*path, "handler"), _function, handler)
            if function is not None:
                self._try((*path, "handler"), subscriber, function)
        for name, plan in self.config.schedules.items():
            self._try(("schedules", name), router.publish_on_schedule, name, **plan.given())
        return router

    def _try(self, path: Path, make: Callable[..., Any], /, *values: Any, **options: Any) -> Any:
        """What `make` makes; None after a SetupError, which is noted.

        It is noted at the option that its text begins with, else at `path`.
        """
        try:
            return make(*values, **options)
        except SetupError as error:
            text = str(error)
            self._document.note((*path, first_name(text) or ""), text)
            return None


def read_service(path: str | os.PathLike[str]) -> Service:
    """Read and check a file.

    Raises:
        SetupError: it cannot be read.
        ConfigError: it has mistakes.
    """
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from None
    document = read_document(text, path, os.environ)
    document.check()
    config = _validated(document)
    document.check()
    assert config is not None  # noqa: S101 - else a mistake was noted
    check_references(document, config)
    document.check()
    return Service(document, config)


def check_service(path: str | os.PathLike[str]) -> None:
    """Make all that the file describes, without the database.

    Raises:
        SetupError: it cannot be read.
        ConfigError: it has mistakes.
        MissingExtraError: the extra is not installed that a part of it needs.
    """
    service = read_service(path)
    broker = service.broker(SqlBroker, {})
    if service.config.http is not None:
        service.application(broker)


def _validated(document: Document) -> ServiceConfig | None:
    try:
        return ServiceConfig.model_validate(document.value)
    except ValidationError as error:
        for path, text, at_key in _texts(document, error.errors(include_url=False)):
            document.note(path, text, at_key=at_key)
        return None


def _texts(document: Document, errors: Iterable[Any]) -> list[tuple[Path, str, bool]]:
    """Each mistake once, with its path in the file, and whether it is the key that is wrong."""
    found: dict[Path, tuple[list[str], bool]] = {}
    of_unions: set[Path] = set()
    for error in errors:
        loc: Path = tuple(error["loc"])
        path = document.known(loc)
        if path != loc and error["type"] != NEEDED:
            # Of one of several forms that a value may have.
            of_unions.add(path)
        texts, _ = found.setdefault(path, ([], error["type"] == UNKNOWN))
        if error["msg"] not in texts:
            texts.append(error["msg"])
    return [
        (path, either(texts) if path in of_unions else "; ".join(texts), at_key)
        for path, (texts, at_key) in found.items()
        if path not in of_unions or not any(_is_below(other, path) for other in found)
    ]


def _is_below(path: Path, other: Path) -> bool:
    return len(path) > len(other) and path[: len(other)] == other


def _metrics() -> Any:
    from faststream_sqlbroker.prometheus.metrics import in_own_registry  # noqa: PLC0415

    return in_own_registry()


def _function(path: str) -> Any:
    found = imported(path, what="handler")
    if not callable(found):
        raise SetupError(f"handler {path!r} is no function")
    return found


def check_references(document: Document, config: ServiceConfig) -> None:
    """Note each name of a queue that is neither below `queues` nor below `destinations`."""
    known = {*config.queues, *config.destinations, *_queues_of_channels(config)}
    for n, name in enumerate(config.destinations):
        if name in config.queues:
            text = f"{name!r} is below queues, too: a queue is consumed here or elsewhere"
            document.note(("destinations", n), text)
    for path, name, at_key in _references(config):
        if name not in known:
            text = (
                f"there is no queue {name!r}: {nearest(name, sorted(known))} (name a queue below "
                "queues, or below destinations if another program consumes it)"
            )
            document.note(path, text, at_key=at_key)


def _queues_of_channels(config: ServiceConfig) -> Iterator[str]:
    """The queues of the consumers in the file."""
    options: dict[str, Any] = {} if config.http is None else config.http.given()
    channels: Channels | None = options.get("channels")
    for name, channel in channels.channels.items() if channels else ():
        for consumer in channel.consumers:
            yield queue_of(name, consumer)


def _references(config: ServiceConfig) -> Iterator[tuple[Path, str, bool]]:
    """Each name with its path, and whether it is the key there."""
    for queue, section in config.queues.items():
        given = section.given()
        yield from _named(("queues", queue), given, ("forward_to", "dead_letter_queue"))
        for n, name in enumerate(given.get("destinations") or ()):
            yield ("queues", queue, "destinations", n), name, False
    for schedule, plan in config.schedules.items():
        named = ("queue", "reply_to", "destination")
        yield from _named(("schedules", schedule), plan.given(), named)
    for name in config.broker.given().get("max_depth") or ():
        yield ("broker", "max_depth", name), name, True


def _named(
    path: Path, given: dict[str, Any], options: tuple[str, ...]
) -> Iterator[tuple[Path, str, bool]]:
    for option in options:
        name = given.get(option)
        # DESTINATION is an object, and names no queue; "" is no reply_to.
        if isinstance(name, str) and name:
            yield (*path, option), name, False
