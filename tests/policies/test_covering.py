"""The pairs of options cover what they are meant to."""

from itertools import permutations

import pytest

from tests.policies.covering import SERVERS, pairs


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_every_pair_is_tried_and_every_option_on_both_sides_of_each_server(count: int) -> None:
    options = range(count)
    assert set(pairs(options, "sqlite")) == set(permutations(options, 2))
    for server in SERVERS:
        tried = pairs(options, server)
        assert all(old != new for old, new in tried)
        assert sorted(old for old, _ in tried) == sorted(new for _, new in tried) == [*options]


def test_servers_try_different_pairs() -> None:
    tried = [pair for server in SERVERS for pair in pairs(range(5), server)]
    assert len(set(tried)) == len(tried)
