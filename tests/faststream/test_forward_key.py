"""forward_key: messages get a new key with the move to the next queue."""

from typing import Any

import pytest
from faststream.params import Header as Param

from faststream_sqlbroker import DESTINATION, Header, SetupError, SqlBroker, Throttle
from faststream_sqlbroker.core.rows import NewMessage
from tests.faststream.conftest import CALM, QUICK, Look
from tests.faststream.test_forward import all_in
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`forward_to`: queue to queue without a handler")
URL = "sqlite+aiosqlite:///x.db"
LONG = "ü" * 255


async def test_all_messages_get_the_fixed_key(broker: SqlBroker, look: Look) -> None:
    keys = ("fixed", LONG, " a", "0")
    for n, key in enumerate(keys):
        broker.subscriber(f"in {n}", **CALM, forward_to="out", forward_key=key)
        await broker.publish("1", f"in {n}", key="own")
        await broker.publish("2", f"in {n}")
    await broker.start()
    # Rows are sorted by the ids, which a move keeps.
    moved = [row["key"] for row in await all_in(look, "out", 2 * len(keys))]
    assert moved == [key for key in keys for _ in range(2)]


async def test_each_message_gets_the_key_of_its_header(broker: SqlBroker, look: Look) -> None:
    """Without a usable value it has none, as for a policy by that header."""
    broker.subscriber("in", **QUICK, forward_to="out", forward_key=Header("tenant"))
    values: list[Any] = ["acme", 7, LONG, LONG + "x", "", None, True, ["acme"]]
    for value in values:
        headers = {} if value is None else {"tenant": value}
        await broker.publish(str(value), "in", key="own", headers=headers)
    await broker.config.store.insert([NewMessage("in", b"1", "[]", key="own")])
    await broker.start()
    rows = await all_in(look, "out", len(values) + 1)
    found = [row["key"] for row in sorted(rows, key=lambda row: row["id"])]
    assert found == ["acme", "7", LONG, *[None] * 6]


async def test_without_it_the_key_stays(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("in", **QUICK, forward_to="out")
    await broker.publish("1", "in", key="own")
    await broker.start()
    [row] = await all_in(look, "out", 1)
    assert row["key"] == "own"


async def test_a_message_with_a_destination_gets_it_too(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("in", **QUICK, forward_to=DESTINATION, forward_key=Header("tenant"))
    await broker.publish("1", "in", destination="out", key="own", headers={"tenant": "acme"})
    await broker.start()
    [row] = await all_in(look, "out", 1)
    assert row["key"] == "acme"


async def test_the_policies_of_the_queue_go_by_the_key_before(
    broker: SqlBroker, look: Look
) -> None:
    """And those of the next queue by the new one: limits by user, then by tenant."""
    by_user = Throttle(1, "1h", key=True)
    broker.subscriber(
        "in", **QUICK, policies=[by_user], forward_to="out", forward_key=Header("tenant")
    )
    for user in ("ada", "bob", "ada"):
        await broker.publish(user, "in", key=user, headers={"tenant": "acme"})
    await broker.start()

    async def moved() -> list[dict[str, Any]]:
        rows = await look.rows()
        return rows if sum(row["queue"] == "out" for row in rows) == 2 else []

    keys = sorted((row["queue"], row["key"]) for row in await eventually(moved))
    assert keys == [("in", "ada"), ("out", "acme"), ("out", "acme")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"forward_key": "k"}, "forward_key needs forward_to, got"),
        ({"forward_key": "", "forward_to": "b"}, "forward_key cannot be ''"),
        ({"forward_key": 7, "forward_to": "b"}, "it must be a string"),
        ({"forward_key": LONG + "x", "forward_to": "b"}, "forward_key cannot be"),
        ({"forward_key": Param("tenant"), "forward_to": "b"}, "faststream_sqlbroker.Header"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Any, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        SqlBroker(URL).subscriber("a", **options)
