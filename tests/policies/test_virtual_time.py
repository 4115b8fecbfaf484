"""The models of policies, on the database and the clock of `TestSqlBroker`: what they say of the
real databases holds there, too."""

import pytest

from tests.policies.machine import Machine, check_model
from tests.policies.test_debounce_model import DebounceMachine
from tests.policies.test_keep_last_model import KeepLastMachine
from tests.policies.test_keyed_throttle_model import KeyedThrottleMachine
from tests.policies.test_once_model import OnceMachine
from tests.policies.test_queue_model import OrderedMachine, QueueMachine
from tests.policies.virtual import VirtualWorld

MACHINES = [
    QueueMachine,
    OrderedMachine,
    DebounceMachine,
    KeepLastMachine,
    KeyedThrottleMachine,
    OnceMachine,
]


@pytest.mark.parametrize("machine", MACHINES)
def test_policies_do_the_same_on_virtual_time(machine: type[Machine]) -> None:
    check_model(machine, "", examples=8, world=VirtualWorld)
