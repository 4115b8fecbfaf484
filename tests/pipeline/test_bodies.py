"""The message of a row is the one that our parser makes, and its ack the one of the message."""

from typing import Any

import pytest
from faststream.message import AckStatus

from faststream_sqlbroker.core.outcome import Ack, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.message import SqlBrokerMessage
from faststream_sqlbroker.parser import SqlBrokerParser
from faststream_sqlbroker.subscriber.pipeline.bodies import ack_quickly, make_quick_parse
from tests.pipeline.axes import FULL, HEADERS, ODD
from tests.pipeline.running import row_of

STORED: list[Any] = [
    *(None, {}, {"content-type": "text/plain"}, "", "no JSON", "[]", "5", "{}", HEADERS, FULL, ODD),
    '{"correlation_id": "c"}',
    '{"correlation_id": ""}',
    '{"correlation_id": null, "content-type": null}',
    '{"reply_to": "a"}',
    '{"reply_to": null}',
    '{"long": "' + "x" * 400 + '"}',
    b'{"content-type": "application/json"}',
]


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("held", [True, False])
def test_the_quick_message_is_the_parsers(stored: Any, held: bool) -> None:
    parser = SqlBrokerParser()
    row = row_of(7, b"{}", stored)
    if not held:
        row.services = None
    quick = make_quick_parse(parser)(row)
    assert type(quick) is SqlBrokerMessage
    parsed = parser.parse(row)
    assert list(vars(quick).items()) == list(vars(parsed).items())
    assert quick.message_id == parsed.message_id == row.message_id
    assert quick.correlation_id == parsed.correlation_id


def test_headers_of_two_messages_are_two() -> None:
    parse = make_quick_parse(SqlBrokerParser())
    one = parse(row_of(7, b"{}", HEADERS))
    one.headers["mine"] = 1
    assert "mine" not in parse(row_of(8, b"{}", HEADERS)).headers


def test_a_parser_that_makes_something_else_is_used() -> None:
    class Parser(SqlBrokerParser):
        def parse(self, row: ClaimedMessage, *args: Any) -> SqlBrokerMessage:
            message = super().parse(row, *args)
            message.path = {"of": "another parser"}
            return message

    assert make_quick_parse(Parser())(row_of(7, b"{}", HEADERS)).path == {"of": "another parser"}


def message() -> Any:
    return SqlBrokerParser().parse(row_of(7, b"{}", HEADERS))


def test_a_quick_ack_is_an_ack() -> None:
    acked = message()
    assert ack_quickly(acked)
    assert acked.raw_message.outcome == Ack()
    assert acked.committed is AckStatus.ACKED


async def test_what_is_settled_is_left_alone() -> None:
    nacked = message()
    await nacked.nack()
    assert not ack_quickly(nacked)
    assert isinstance(nacked.raw_message.outcome, Nack)


def test_an_ack_that_is_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = message()
    replaced.ack = lambda: None
    assert not ack_quickly(replaced)
    monkeypatch.setattr(SqlBrokerMessage, "ack", lambda _self: None)
    assert not ack_quickly(message())
