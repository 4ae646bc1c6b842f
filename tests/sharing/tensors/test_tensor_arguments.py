"""Tensors in operations: views, gradients, errors; and in a session, where not every rank has torch."""

from __future__ import annotations

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveMismatchError, ReadOnlyArrayError
from tests.harness.ranks import context_of
from tests.sharing.tensors.optional import needs_torch, torch, torchs_threads
from tests.sharing.tensors.test_arrays_of_others import values_of

pytestmark = [needs_torch, torchs_threads]


@pytest.fixture(autouse=True)
def imported() -> None:
    """Import torch before ranks are forked: they need not do it one by one."""
    assert torch.float32


def test_views_of_shared_tensors_are_tensors_over_the_same_memory() -> None:
    """`view=True` copies nothing, and a private tensor is refused."""

    def program(c: Communicator) -> None:
        x = torch.from_numpy(context_of(c).store.zeros((1000,), "f4")).view(10, 100).t()
        views = c.all_gather(x, view=True)
        views += [c.broadcast(x if c.rank == 0 else None, view=True)]
        c.isend(x, 1 - c.rank, view=True)
        views += [c.recv(src=1 - c.rank)]
        x[0, 0] = c.rank + 1
        c.barrier()
        assert [float(view[0, 0]) for view in views] == [1, 2, 1, 2 - c.rank]
        assert all(view.shape == (100, 10) for view in views)
        c.barrier()
        for call in (c.all_gather, lambda x, view: c.send(x, 1 - c.rank, view=view)):
            with pytest.raises(ValueError, match="memory is private"):
                call(torch.zeros(3), view=True)

    values_of(program)


def test_a_module_takes_the_roots_parameters() -> None:
    """Broadcast fills a module in place: its parameters, and what else its state consists of; so later."""

    def program(c: Communicator) -> None:
        torch.set_num_threads(1)
        for size, options in ((3, {}), (3, {"async_op": True}), (300, {})):
            torch.manual_seed(c.rank)
            model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size))
            weight, before = model[0].weight, model[0].weight.detach().clone()
            model[1].num_batches_tracked.fill_(c.rank)
            found = c.broadcast(model, src=1, **options)
            assert (found.wait() and found.result() if options else found) is model
            assert model[0].weight is weight
            assert bool((weight == before).all()) == (c.rank == 1)
            assert int(model[1].num_batches_tracked) == 1
            c.assert_same(model)
        copy = c.broadcast(model if c.rank == 0 else None, src=0)
        assert type(copy) is type(model)

    values_of(program)


@pytest.mark.parametrize(
    ("other", "error", "said"),
    [
        ("torch.nn.Linear(2, 3)", RuntimeError, "size mismatch"),
        ("5", TypeError, "pass None to get it as a new value"),
    ],
)
def test_a_module_that_does_not_fit(other: str, error: type[Exception], said: str) -> None:
    """What cannot be taken over is named, instead of a model that stays as it was."""

    def program(c: Communicator) -> None:
        if c.rank == 0:
            c.broadcast(eval(other), src=0)
        else:
            with pytest.raises(error, match=said):
                c.broadcast(torch.nn.Linear(3, 2), src=0)

    values_of(program)


def test_gradients_of_a_module_are_averaged() -> None:
    """A module and its parameters stand for their gradients; a list of tensors for itself; bfloat16 too."""

    def program(c: Communicator) -> None:
        torch.set_num_threads(1)
        for dtype in (torch.float32, torch.bfloat16):
            model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).to(dtype)
            model[0].bias.requires_grad_(False)
            for x in model.parameters():
                x.grad = torch.full_like(x, c.rank + 1.0) if x.requires_grad else None
            assert c.average_gradients(model) is model
            assert all(bool((x.grad == 1.5).all()) for x in model.parameters() if x.requires_grad)
            for x in model.parameters():
                x.grad = torch.full_like(x, c.rank + 1.0) if x.requires_grad else None
            c.average_gradients(model.parameters(), weight=c.rank)
            assert all(bool((x.grad == 2).all()) for x in model.parameters() if x.requires_grad)
            values = [x.grad.clone() + c.rank for x in model.parameters() if x.requires_grad]
            assert c.average_gradients(values) is values
            assert all(bool((x == 2.5).all()) for x in values)
            c.average_gradients({"w": values[0][::2]})
            assert c.average_gradients(values[1]) is values[1]
        model.register_parameter("more" if c.rank else "other", torch.nn.Parameter(torch.ones(1)))
        for x in model.parameters():
            x.grad = torch.ones_like(x)
        with pytest.raises(CollectiveMismatchError, match=r"\['more'\]"):
            c.average_gradients(model)
        c.barrier()

    values_of(program)


def test_only_the_caller_raises_and_operations_go_on() -> None:
    """A tensor without memory of its own is refused before other ranks learn of the call, in one sentence."""

    def program(c: Communicator) -> None:
        sparse, empty = torch.eye(3).to_sparse(), torch.zeros(3, device="meta")
        x, repeated = torch.ones(3), torch.ones(1).expand(3)
        calls = [
            lambda bad: c.all_reduce(bad), lambda bad: c.all_reduce(bad, async_op=True),
            lambda bad: c.broadcast(bad), lambda bad: c.send(bad, 1 - c.rank),
            lambda bad: c.recv(bad, 1 - c.rank), lambda bad: c.irecv(bad, 1 - c.rank),
            lambda bad: c.all_gather(bad), lambda bad: c.all_gather([x, bad], x), lambda bad: c.reduce(bad),
            lambda bad: c.scatter(bad, [x, x], src=c.rank), lambda bad: c.all_to_all([x, bad]),
            lambda bad: c.reduce_scatter(bad, [x, x]), lambda bad: c.scan(bad), lambda bad: c.maxloc(bad),
            lambda bad: c.assert_same({"w": bad}), lambda bad: c.average_gradients([bad]),
            lambda bad: c.all_gather_into_tensor(bad, x), lambda bad: c.sendrecv(x, 0, 0, output=bad),
        ]  # fmt: skip
        for bad, advice in ((sparse, "to_dense"), (empty, "no data")):
            for call in calls:
                with pytest.raises(TypeError, match=advice):
                    call(bad)
        for call in (calls[0], calls[1], calls[4], calls[5], calls[7], calls[11], calls[12], calls[15]):
            with pytest.raises(ReadOnlyArrayError):
                call(repeated)
        with pytest.raises(ReadOnlyArrayError, match=r"x\.clone\(\)"):
            c.all_reduce(repeated)
        assert c.all_reduce(1) == 2
        with pytest.raises(TypeError, match="does not work for tensors of dtype float8_e5m2"):
            c.all_reduce(torch.zeros(3).to(torch.float8_e5m2))

    values_of(program)
    assert not nbp.is_shared(torch.eye(3).to_sparse())


def test_a_mismatch_names_the_elements_as_torch_does() -> None:
    """A table of what ranks called shows ``bfloat16``, and so does a message that does not fit."""

    def program(c: Communicator) -> None:
        c.isend(torch.zeros(2, dtype=torch.bfloat16), 1 - c.rank)
        with pytest.raises(CollectiveMismatchError, match=r"bfloat16 +\(2,\)") as caught:
            c.recv(torch.zeros(2), 1 - c.rank)
        assert "u2" not in str(caught.value)
        assert c.recv(src=1 - c.rank).dtype == torch.bfloat16
        with pytest.raises(CollectiveMismatchError, match="bfloat16") as caught:
            c.all_reduce(torch.zeros(2, dtype=torch.bfloat16 if c.rank else torch.float32))
        assert "u2" not in str(caught.value)

    values_of(program)


def test_what_is_sent_is_data_without_autograd() -> None:
    """A parameter arrives as a plain tensor; a reduction changes it, and autograd records nothing."""

    def program(c: Communicator) -> None:
        x = torch.nn.Parameter(torch.ones(3) * (c.rank + 1))
        loss = (x * x).sum()
        assert c.all_reduce(loss) is loss
        assert loss.item() == 15
        for got in c.all_gather(x):
            assert type(got) is torch.Tensor
            assert not got.requires_grad
        assert c.all_reduce(x) is x
        assert x.requires_grad
        assert x.grad_fn is None
        loss.backward()
        assert x.grad.tolist() == [6, 6, 6]  # of the data that there is now, as in torch

    values_of(program)


def test_values_are_copied_where_they_would_change() -> None:
    """A tensor may be changed after a nonblocking call has begun; outputs may lie over what is sent."""

    def program(c: Communicator) -> None:
        for size in (3, 100_000):
            x = torch.full((size,), c.rank + 1.0)
            works = [c.all_gather(x, async_op=True), c.all_to_all([x, x], async_op=True)]
            x.zero_()
            for work in works:
                assert [float(value[-1]) for value in work.result()] == [1, 2]
            both = torch.tensor([[1.0], [2.0]]).repeat(1, size)
            c.all_gather([both[0], both[1]], both[1 - c.rank])
            assert both[:, -1].tolist() == [2, 1]

    values_of(program)


@pytest.mark.may_leave("thread", reason="torch starts its pool of threads with its first sum")
def test_ranks_of_a_process_that_has_used_torch_s_threads() -> None:
    """A forked rank does not wait for a pool of threads that only its parent has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert float(torch.ones(1_000_000).sum()) == 1_000_000
        assert values_of(lambda c: float(torch.ones(1_000_000).sum())) == [1_000_000] * 2
    finally:
        torch.set_num_threads(threads)


def test_parts_and_batches_are_tensors() -> None:
    """`shard` is a view of the tensor, and batches hold rows of it."""

    def program(c: Communicator) -> None:
        x = torch.arange(12.0).view(6, 2)
        part = c.shard(x)
        assert part.data_ptr() == x[3 * c.rank].data_ptr()
        seen = []
        for rows, ys in c.batches(x, x.numpy()[:, 0], batch_size=2, epoch=0):
            assert isinstance(rows, torch.Tensor)
            assert isinstance(ys, np.ndarray)
            assert rows[:, 0].tolist() == ys.tolist()
            seen += ys.tolist()
        assert sorted(y for part in c.all_gather(seen) for y in part) == x[:, 0].tolist()

    values_of(program)


PROGRAM = """
import sys
if rank == 0:
    import torch
    x = torch.arange(5).bfloat16()
    for size in (5, 500_000):
        broadcast(torch.ones(size))
        send(torch.ones(size, dtype=torch.bfloat16), 1)
    found = gather(x[rank:][:1])
else:
    before = "torch" in sys.modules
    kinds = [(type(y).__name__, str(y.dtype)) for _ in range(2) for y in (broadcast(None), recv(src=0))]
    found = gather(kinds[0]), before, kinds, type(recv).__name__
found
"""


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_a_rank_without_torch_receives_tensors() -> None:
    """It imports torch when the first tensor arrives, and not before."""
    with nbp.Session(2) as session:
        first, second = session.run(PROGRAM, namespace={}).values
    assert type(first[0]).__name__ == "Tensor"
    _, before, kinds, _ = second
    assert not before
    assert kinds == [("Tensor", "torch.float32"), ("Tensor", "torch.bfloat16")] * 2


READ_ONLY = """
import warnings
import torch
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    t = torch.from_numpy(x)
errors = []
for fill in (lambda: all_reduce(t), lambda: all_reduce(t, async_op=True), lambda: recv(t, 1 - rank),
             lambda: all_gather([t, t.clone()], t), lambda: dist.average_gradients([t])):
    try:
        fill()
    except ValueError as error:
        errors.append(str(error))
errors, broadcast(t if rank else None, src=1)[-1].item()
"""


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_a_tensor_over_memory_for_reading_only_is_not_written() -> None:
    """Torch takes such an array of the notebook for writable: operations refuse it, and the rank lives."""
    x = np.arange(300_000.0)
    with nbp.Session(2) as session:
        errors, last = session.run(READ_ONLY, namespace={"x": x}).values[0]
    assert last == 299_999
    assert len(errors) == 5
    for error in errors:
        assert "read-only" in error


def test_memory_that_ranks_share_names_the_way_to_copy_a_tensor() -> None:
    """Several ranks cannot reduce one shared tensor in place."""

    def program(c: Communicator) -> None:
        mine = torch.from_numpy(context_of(c).store.zeros((10_000,), "f4"))
        shared = c.broadcast(mine if c.rank == 0 else None, view=True)
        with pytest.raises(ValueError, match=r"of a tensor `x\.clone\(\)`"):
            c.all_reduce(shared)

    values_of(program)
