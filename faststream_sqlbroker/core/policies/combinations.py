"""Check which policies can be combined, and in which order."""

from collections.abc import Iterable, Sequence

from faststream_sqlbroker.core.policies.basic import BlockingWait, Concurrency, Delay, Once
from faststream_sqlbroker.core.policies.debounce import Debounce
from faststream_sqlbroker.core.policies.header import Header, Key
from faststream_sqlbroker.core.policies.keep_last import KeepLast
from faststream_sqlbroker.core.policies.throttle import Throttle
from faststream_sqlbroker.core.policies.window import Window
from faststream_sqlbroker.exceptions import SetupError

Policy = Delay | Debounce | KeepLast | Throttle | Window | Once | Concurrency | BlockingWait

POLICY_CLASSES: tuple[type, ...] = (
    Delay,
    Debounce,
    KeepLast,
    Throttle,
    Window,
    Once,
    Concurrency,
    BlockingWait,
)
_CONSUMING_POLICIES = Throttle, Concurrency, Once


def validate_policies(policies: object) -> tuple[Policy, ...]:
    """Check and return `policies` as a tuple.

    Raises:
        SetupError: an item is not a policy, or policies contradict each other.
    """
    names = ", ".join(kind.__name__ for kind in POLICY_CLASSES)
    if isinstance(policies, (*POLICY_CLASSES, str, bytes)) or not isinstance(policies, Iterable):
        raise SetupError(
            f"policies must be a list of {names}, got {policies!r}: put it in brackets"
        )
    items = tuple(policies)
    for policy in items:
        if isinstance(policy, type) and policy in POLICY_CLASSES:
            raise SetupError(
                f"policies must contain instances, got the class {policy.__name__}: call it"
            )
        if not isinstance(policy, POLICY_CLASSES):
            raise SetupError(f"policies must contain only {names}, got {policy!r}")
    _check_repeated(items)
    _check_scopes(items)
    _check_order(items)
    _check_keys(items)
    return items


def _check_repeated(policies: Sequence[Policy]) -> None:
    """Refuse repeated policies that a subscriber may have only once.

    Throttles whose slots are not bound to messages (`gates`) can be combined; a Throttle that gives
    each message its own slot can not.
    """
    for policy_class in (Delay, Window, Once, BlockingWait):
        _check_single(
            f"a {policy_class.__name__}", [p for p in policies if isinstance(p, policy_class)]
        )
    standby_policies = [p for p in policies if isinstance(p, Debounce | KeepLast)]
    _check_single("a Debounce or KeepLast", standby_policies)
    slots_per_message = [p for p in policies if isinstance(p, Throttle) and not p.gates]
    _check_single(
        "a Throttle per key, or one that backs off, drops or dead-letters,", slots_per_message
    )
    for per_key in (False, True):
        same = [p for p in policies if isinstance(p, Concurrency) and bool(p.per_key) is per_key]
        _check_single("a Concurrency of the same kind", same)


def _check_scopes(policies: Sequence[Policy]) -> None:
    """Refuse two Throttles with the same scope, as a start would take two slots of the budget."""
    scoped = [p for p in policies if isinstance(p, Throttle) and p.scope is not None]
    for scope in {p.scope for p in scoped}:
        _check_single(f"a Throttle of the scope {scope!r}", [p for p in scoped if p.scope == scope])


def _check_single(label: str, policies: Sequence[Policy]) -> None:
    """Raise SetupError if there are several `policies`; `label` names their kind.

    The caller has selected policies of which a subscriber may have only one.
    """
    if len(policies) > 1:
        names = " and ".join(str(policy) for policy in policies)
        raise SetupError(f"{label} can be given only once, got {names}: keep one of them")


def _check_order(policies: Sequence[Policy]) -> None:
    """Refuse an order of policies that wastes slots, leases or keys.

    Throttle, Concurrency and Once use up one of these for each message. So Delay, Debounce and
    KeepLast, after which a message waits or is discarded, must come first. Concurrency per key is
    refused with Debounce and KeepLast, which already deliver one message of a key at a time.
    """
    for n, policy in enumerate(policies):
        earlier = [p for p in policies[:n] if isinstance(p, _CONSUMING_POLICIES)]
        if isinstance(policy, Debounce | KeepLast | Delay) and earlier:
            raise SetupError(
                f"{policy} comes after {earlier[0]}, which would be spent on messages that then "
                f"wait or are discarded: put {policy} first"
            )
    debounce = next((p for p in policies if isinstance(p, Debounce | KeepLast)), None)
    per_key = next((p for p in policies if isinstance(p, Concurrency) and p.per_key), None)
    if debounce is not None and per_key is not None:
        raise SetupError(
            f"{debounce} delivers the messages of a key one at a time, so {per_key} is redundant "
            "or contradicts it: remove it"
        )


def get_policy_key(policy: Policy) -> Key:
    """Return the key option of a policy; False without a key."""
    if isinstance(policy, Concurrency):
        return policy.per_key
    return getattr(policy, "key", False)


def find_key_header(policies: Iterable[Policy], *, ordered: bool = False) -> Header | None:
    """Return the header by whose values claims choose messages; None: by the key of the publish.

    `ordered` and every other policy come before Once, whose key is read from claimed messages. Only
    without them the header of Once is the claims' as well, so that its keys are stored in a column.
    """
    if ordered:
        return None
    keyed = sorted(filter(get_policy_key, policies), key=lambda policy: isinstance(policy, Once))
    key = get_policy_key(keyed[0]) if keyed else False
    return key if isinstance(key, Header) else None


def find_once(policies: Iterable[Policy]) -> Once | None:
    """Return the policy Once of `policies`, or None without that policy."""
    return next((policy for policy in policies if isinstance(policy, Once)), None)


def _check_keys(policies: Sequence[Policy]) -> None:
    """Refuse different keys of policies by which claims choose messages.

    Claims find these messages by one indexed column: the key of the publish, or the value of one
    header. Once is not asked by claims, so it may have another key.
    """
    keys = {
        key: policy
        for policy in policies
        if not isinstance(policy, Once) and (key := get_policy_key(policy))
    }
    if len(keys) > 1:
        names = " and ".join(f"{policy} by {_format_key(key)}" for key, policy in keys.items())
        raise SetupError(
            f"the policies of a subscriber must use one key, except for Once, got {names}: give "
            "all of them the same key, or use two queues, the first with forward_to"
        )


def _format_key(key: Key) -> str:
    return str(key) if isinstance(key, Header) else "the key of the publish"


def check_ordered(policies: Sequence[Policy]) -> None:
    """Refuse policies that contradict ordered=True.

    Raises:
        SetupError: a policy selects another message of a key than the first.
    """
    for policy in policies:
        if isinstance(get_policy_key(policy), Header) and not isinstance(policy, Once):
            raise SetupError(
                f"ordered=True uses the key of the publish, but {policy} uses a header: publish "
                "with that key, or remove one of the two"
            )
        if isinstance(policy, Debounce | KeepLast):
            raise SetupError(
                f"ordered=True delivers every message of a key, the oldest first, but {policy} "
                "delivers one of several: remove one of the two"
            )
        if isinstance(policy, Concurrency) and policy.per_key:
            raise SetupError(
                f"ordered=True leases one message of a key at a time, but {policy} sets its own "
                "limit: remove one of the two"
            )
        if (
            isinstance(policy, Throttle)
            and policy.when_exceeded in {"drop", "dead_letter"}
            and policy.key
        ):
            raise SetupError(
                f"ordered=True delivers every message of a key, but {policy} removes some: "
                'use when_exceeded="wait"'
            )


def check_ack_first(policies: Sequence[Policy]) -> None:
    """Refuse policies that AckPolicy.ACK_FIRST makes impossible.

    ACK_FIRST removes a message before its handler starts, so there is no lease that a policy could
    count or hold.

    Raises:
        SetupError: a policy needs a message until its handler has ended.
    """
    for policy in policies:
        if isinstance(policy, Concurrency | Once | BlockingWait):
            raise SetupError(
                "AckPolicy.ACK_FIRST removes a message before its handler starts, but "
                f"{policy} needs the message until its handler has ended: use another policy"
            )
