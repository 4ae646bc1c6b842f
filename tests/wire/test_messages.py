"""Messages arrive as what they were sent as."""

import dataclasses
import pickle

import pytest

from nbparallel.wire import messages
from nbparallel.wire.messages import Message, RankMemory, RankSegment

KINDS = sorted(
    (kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Message])
def test_every_message_arrives_equal(kind):
    """Each field has its place, also in a message that inherits some and one inside another."""
    assert len(KINDS) > 15
    values = [f"{kind.__name__}.{field.name}" for field in dataclasses.fields(kind)]
    values[-1] = RankMemory((RankSegment(1, 2, "s", "live", True),), 1, 2, 3)
    message = kind(*values)
    data = pickle.dumps(message, 5)
    assert pickle.loads(data) == message
    assert b"dataclass" not in data, "it would be packed field by field"
    assert not hasattr(message, "__dict__")
