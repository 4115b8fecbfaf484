"""Names of queues in a file: each one is there."""

from collections.abc import Iterator
from typing import Any

from faststream_sqlbroker.config.document import Document, Path
from faststream_sqlbroker.config.fields import nearest
from faststream_sqlbroker.config.models import ServiceConfig
from faststream_sqlbroker.core.channels import Channels, queue_of


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
        yield from _named(("schedules", schedule), plan.given(), ("queue", "reply_to"))
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
