"""Shared modules and tensors on real ranks: the tutorials' programs, results, memory, and the ledger."""

import gc
import textwrap

import pytest

import nbparallel as nbp
from nbparallel.sharing import Store, current_store
from nbparallel.testing.waiting import wait_until
from tests.sharing.tensors.optional import needs_torch, torch, torchs_threads

pytestmark = [needs_torch, torchs_threads, pytest.mark.time_limit(120)]
RANKS = 2


@pytest.fixture(scope="module")
def session():
    """Return a session whose ranks have imported torch."""
    with nbp.Session(RANKS) as session:
        session.run("import torch", namespace={})
        yield session


@pytest.fixture
def notebook(session):
    """Return what types into a notebook, runs a cell on its ranks, and its names; then all is forgotten."""
    names = {"__name__": "__main__"}
    exec("import torch\nfrom torch import nn\nimport torch.optim as optim\nimport nbparallel as nbp", names)

    def cell(source, **options):
        return list(session.run(textwrap.dedent(source), namespace=names, **options).values)

    yield lambda source: exec(textwrap.dedent(source), names), cell, names
    names.clear()
    session.run("pass", namespace=names)
    session.run("%reset -f\nimport torch", namespace=names)
    wait_until(lambda: not adopted(), "what torch had shared is released")


def adopted():
    """Return the segments that torch's own shared memory has become."""
    gc.collect()
    current_store().drain()
    return [record for record in nbp.segments() if record.strategy == "mmap"]


HOGWILD = """
class LinearRegression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
    def forward(self, x):
        return self.linear(x)

def train(rank, model, inputs, targets, epochs=30):
    torch.manual_seed(rank)
    criterion = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        for batch in torch.randperm(len(inputs)).split(50):
            optimizer.zero_grad()
            loss = criterion(model(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
    return loss.item()

torch.manual_seed(0)
inputs = torch.randn(1000, 3)
targets = inputs @ torch.tensor([[2.0], [-1.0], [0.5]]) + 3
model = LinearRegression()
"""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("way", ["model.share_memory()", "nbp.share(model)", "--share model"])
def test_hogwild_linear_regression(notebook, way):
    """The tutorial's program but for `Process` and `join`: all ranks train the notebook's own model."""
    type_, cell, names = notebook
    type_(HOGWILD)
    share = ("model",) if way.startswith("--") else ()
    if not share:
        type_(way)
    losses = cell("train(rank, model, inputs, targets)", share=share)
    assert len(losses) == RANKS
    assert max(losses) < 0.01
    weight, bias = names["model"].linear.weight, names["model"].linear.bias
    assert torch.allclose(weight, torch.tensor([[2.0, -1.0, 0.5]]), atol=0.05)
    assert abs(bias.item() - 3) < 0.05
    assert nbp.is_shared(names["model"])
    assert names["model"].linear.weight.is_shared()
    assert cell("model.linear.weight.is_shared() and nbp.is_shared(model)") == [True] * RANKS


@pytest.mark.slow
def test_a_shared_tensor_is_written_by_all(notebook):
    """`share_memory_()` and slices: every rank writes its part, all see all; a clone is private."""
    type_, cell, names = notebook
    type_("tensor = torch.zeros(4, 1000)\ntensor.share_memory_()\nrow = tensor[3]")
    cell("tensor[rank] += rank + 1; barrier(); assert tensor.sum() == 3000; barrier()")
    cell("row.fill_(7); tensor.clone().fill_(9)")
    assert names["tensor"].sum(1).tolist() == [1000, 2000, 0, 7000]
    assert len(adopted()) == 1, "it stands in the list"
    del names["row"], names["tensor"]
    cell("1")
    wait_until(lambda: not adopted(), "it is released")


def test_tables_name_what_lies_in_shared_memory(session, notebook):
    """`who` says that a module and a tensor are shared; segments have their names."""
    type_, cell, names = notebook
    type_(
        "model = nbp.share(nn.Linear(300, 300))\nt = torch.zeros(3, 4).share_memory_()\nmine = torch.zeros(3)"
    )
    cell("model, t, mine, torch")
    found = {record.name: record for record in session.who(names).names}
    assert {name: found[name].how for name in ("model", "t", "mine")} == {
        "model": "shared",
        "t": "shared",
        "mine": "copied",
    }
    assert found["t"].ranks[1].looks == found["t"].notebook.looks == "Tensor (3, 4) float32"
    assert not found["t"].outdated
    assert not found["model"].outdated
    seen = session.statistics(names).segments
    assert {name for record in seen for name in record.names} == {"model", "t"}


def test_from_numpy_of_a_shared_array(notebook):
    """`torch.from_numpy(nbp.zeros(…))`, in the notebook and on ranks, is one memory."""
    type_, cell, names = notebook
    type_("array = nbp.zeros((2, 500), 'f4')\ntensor = torch.from_numpy(array)")
    cell("tensor[rank] += 1\ntorch.from_numpy(array)[rank] += 1")
    assert (names["array"] == 2).all()


def test_values_that_ranks_return_are_tensors(notebook):
    """Last values, `pull`, and modules inside them: equal, tied, and the notebook's own."""
    type_, cell, names = notebook
    type_(HOGWILD)
    parts = cell("torch.full((300, 300), float(rank)), model")
    assert [float(t[0, 0]) for t, _ in parts] == [0, 1]
    assert all(torch.equal(m.linear.weight, names["model"].linear.weight) for _, m in parts)
    parts[0][0].add_(5)
    cell("state = {'w': torch.arange(100_000.) + rank}; state['part'] = state['w'][7:]\n1")


def test_pulled_tensors_stay_tied(session):
    """A view in a pulled dict is a view of the pulled tensor."""
    session.run("state = {'w': torch.arange(100_000.) + rank}; state['part'] = state['w'][7:]", namespace={})
    pulled = session.pull("state")
    pulled[1]["part"][0] = -1
    assert pulled[1]["w"][7] == -1
    assert pulled[0]["w"][7] == 7
    session.run("del state", namespace={})


def test_tensors_between_ranks(notebook):
    """A sent state dict is the receiver's own; shared tensors inside travel as the same memory."""
    type_, cell, names = notebook
    type_("shared = nbp.share(torch.zeros(10))")
    cell(
        """
        if rank == 0:
            send({"own": torch.ones(100_000), "shared": shared}, 1)
        else:
            got = recv(src=0)
            got["own"].add_(1)
            got["shared"].add_(1)
        """
    )
    assert names["shared"].tolist() == [1] * 10


MEMORY = """
def own_bytes():
    with open("/proc/self/smaps_rollup") as file:
        # not Private_Dirty: a shared page counts there until a second process has read it
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))
"""


def test_ranks_hold_one_copy_of_a_state_dict(notebook):
    """A rank that reads all of it has no page of its own; one that writes has those that it wrote."""
    type_, cell, names = notebook
    type_(MEMORY + "state = {i: torch.rand(1_000_000) for i in range(20)}")
    cell("torch.ones(1_000_000).sum()\nbefore = own_bytes()")  # what torch needs for its first sum is there
    used = cell("total = sum(t.sum() for t in state.values())\nown_bytes() - before")
    assert max(used) < 20_000_000, used
    used = cell("state[3].add_(1)\nown_bytes() - before")
    assert all(3_900_000 < each < 24_000_000 for each in used), used
    assert float(names["state"][3].max()) <= 1


@pytest.mark.slow
def test_a_shared_module_goes_to_two_sessions_and_to_ranks_that_are_new(session, monkeypatch):
    """Its handles are asked for once in each session, again for other ranks; all write the same memory."""
    asked = []
    handle = Store.handle
    monkeypatch.setattr(Store, "handle", lambda *args, **options: asked.append(1) or handle(*args, **options))
    layer = nbp.share(torch.nn.Linear(1, 1, bias=False))
    names = {"layer": layer}
    add = "with torch.no_grad(): layer.weight += 1"
    with torch.no_grad():
        layer.weight.zero_()
    with nbp.Session(1) as other:
        other.run("import torch", namespace={})
        for here in (session, session, other, session, other, other):
            asked.clear()
            here.run(add, namespace=names, ranks=[0])
        assert not asked, "the session has the handle already"
        assert layer.weight.item() == 6
        other.restart()
        other.run(f"import torch\n{add}", namespace=names)
        assert layer.weight.item() == 7
    names.clear()
    session.run("pass", namespace=names)
