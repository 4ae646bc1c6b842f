"""Data-parallel training in cells: the notebook's arrays, and what a student sees of an error."""

from __future__ import annotations

import numpy as np
import pytest

from nbparallel.errors import DifferentDataError, ParallelError
from nbparallel.session import Session

TRAIN = """
import numpy as np
w = np.zeros(3)
for epoch in range(epochs):
    for xb, yb in dist.batches(inputs, targets, batch_size=16, epoch=epoch, seed=1):
        gradient = {"w": 2 * xb.T @ (xb @ w - yb) / max(1, len(xb))}
        dist.average_gradients(gradient, weight=len(xb))
        w -= 0.1 * gradient["w"]
dist.assert_same(w)
w.tobytes()
"""


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_a_training_loop() -> None:
    """Ranks end with the same bits and the right weights, as one rank with larger batches does."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(1003, 3))
    true = np.array([2.0, -1.0, 0.5])
    namespace = {"inputs": inputs, "targets": inputs @ true, "epochs": 4}
    found = {}
    for n in (1, 3):
        with Session(n) as session:
            bits = list(session.run(TRAIN, namespace=namespace).values)
            assert len(set(bits)) == 1
            found[n] = np.frombuffer(bits[0])
            assert session.run("dist.shard(inputs).shape", namespace=namespace).values[n - 1][0] == 1003 // n
    assert np.abs(found[1] - true).max() < 1e-3
    assert np.abs(found[3] - true).max() < 1e-3


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_what_a_student_sees() -> None:
    """The error is one line, the same from all ranks; the next cell goes on; the names are not predefined."""
    with Session(3) as session:
        session.run("import numpy as np\nw = np.full(4, 0.5)\nif rank == 1: w[2] = 0.25\nbarrier()")
        with pytest.raises(ParallelError) as caught:
            session.run("x = 1\ndist.assert_same({'w': w})")
        assert set(caught.value.errors) == {0, 1, 2}
        assert all(isinstance(error, DifferentDataError) for error in caught.value.errors.values())
        assert caught.value.errors[2].groups == ((0, 2), (1,))  # type: ignore[attr-defined]
        assert str(caught.value) == (
            "DifferentDataError on ranks 0-2, line 2: not all ranks hold the same data: ranks 0, 2 agree; "
            "rank 1 differs at ['w'][2]: 0.25 instead of 0.5 (1 of 4 elements, at most 0.25 apart)"
        )
        code = """
class Model:
    pass
model = Model()
model.w = w
try:
    dist.assert_same(model)
except AssertionError as error:
    said = str(error)
dist.assert_same(rank, group=dist.new_group([rank]))
w[2] = 0.5
dist.assert_same(model)
missing = [name for name in ("assert_same", "shard", "batches") if name in globals()]
said.endswith("rank 1 differs at .w[2]: 0.25 instead of 0.5 (1 of 4 elements, at most 0.25 apart)"), missing
"""
        assert list(session.run(code).values) == [(True, [])] * 3
        with pytest.raises(ParallelError, match="rank 2 is not in this cell"):
            session.run("dist.assert_same(1)", ranks=(0, 1))
        assert list(session.run("dist.shard([1, 2, 3])", ranks=(0, 1)).values) == [[1], [2]]
