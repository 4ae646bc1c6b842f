"""Tensors as names and inside objects: out of band, written once, each rank's own, and tied as they were."""

import copy
import io
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import nbparallel as nbp
from nbparallel.session.names.delivery import LATER
from nbparallel.sharing.tensor_storage import share_tensors
from tests.session.names.pair import Pair
from tests.sharing.tensors.optional import needs_torch, torch, torchs_threads

pytestmark = [needs_torch, torchs_threads, pytest.mark.time_limit(120)]


@pytest.fixture
def pair():
    """Return a notebook and a rank."""
    pair = Pair()
    pair.type("import torch")
    yield pair
    pair.close()


DTYPES = ["float32", "float64", "int64", "uint8", "bool", "complex64", "bfloat16", "float16", "uint16"]
LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 100, 70_001])  # the last ones travel beside the stream


@st.composite
def forests(draw, store):
    """Return a list, tuple or dict of tensors: views of one another, the very same twice, parameters …."""
    roots = [
        (torch.rand(draw(LENGTHS)) * 100 + 1).to(getattr(torch, draw(st.sampled_from(DTYPES))))
        for _ in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        roots.append(share_tensors(torch.rand(draw(LENGTHS)) + 1, store))
    leaves = []
    for _ in range(draw(st.integers(1, 6))):
        root = draw(st.sampled_from(roots))
        leaf = {
            "itself": lambda r: r,
            "part": lambda r: r[len(r) // 3 :],
            "strided": lambda r: r[::3],
            "matrix": lambda r: r[: len(r) // 4 * 4].view(4, -1).t(),
            "repeated": lambda r: r[:1].expand(5, -1),
            "0-d": lambda r: r.flatten()[0] if len(r) else torch.tensor(3),
            "without elements": lambda r: r[:0].view(0, 1, 0) if len(r) else torch.empty(0, 2),
            "parameter": lambda r: torch.nn.Parameter(r, r.is_floating_point() or r.is_complex()),
            "needs grad": lambda r: r.detach().requires_grad_(r.is_floating_point() or r.is_complex()),
        }[draw(st.sampled_from(FORMS))](root)
        leaves.append(leaf)
    shape = draw(st.sampled_from(["list", "tuple", "dict", "nested"]))
    if shape == "nested":
        return [tuple(leaves), {"again": leaves}]
    return {"list": list, "tuple": tuple, "dict": lambda x: dict(enumerate(x))}[shape](leaves)


FORMS = [
    "itself", "part", "strided", "matrix", "repeated", "0-d", "without elements", "parameter", "needs grad",
]  # fmt: skip


def flat(tree):
    """Return the tensors of a tree, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [x for part in (tree.values() if isinstance(tree, dict) else tree) for x in flat(part)]


def aliasing(tensors):
    """Return for each tensor which of them is the same object, and which lies over the same storage."""
    return [
        (
            [a is b for b in tensors],
            [a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in tensors],
        )
        for a in tensors
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_tree_of_tensors_arrives_equal_and_tied_as_it_was(data):
    """Values, dtypes, strides, offsets, `requires_grad`, classes and aliases; a write stays the rank's."""
    pair = Pair()
    try:
        tree = pair.notebook["tree"] = data.draw(forests(pair.kernel_store))
        there, here = flat(pair.run("tree")), flat(tree)
        assert aliasing(there) == aliasing(here)
        for mine, other in zip(here, there, strict=True):
            assert type(other) is type(mine)
            assert other.dtype == mine.dtype
            assert other.size() == mine.size()
            assert other.stride() == mine.stride()
            assert other.storage_offset() == mine.storage_offset()
            assert other.requires_grad == mine.requires_grad
            assert torch.equal(mine.detach(), other.detach())
            if mine.untyped_storage().nbytes():
                assert other.is_shared() == mine.is_shared()
        pair.run("tree")
        assert pair.sent() == []
        for mine, other in zip(here, there, strict=True):
            other.untyped_storage().fill_(0)
            assert mine.is_shared() or not mine.numel() or bool(mine.any())
            assert not mine.is_shared() or not mine.any()
        del there, here, tree, mine, other
    finally:
        pair.close()


MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(300, 300)
        self.b = torch.nn.Linear(300, 300)
        self.norm = torch.nn.BatchNorm1d(300)
        self.b.weight = self.a.weight
    def forward(self, x):
        return self.norm(self.b(self.a(x)))
model = Net()
"""


def test_a_state_dict_is_written_once_and_not_sent_again_unless_it_changes(pair):
    """Its bytes go into a segment once for tied and viewed memory; a change in place is seen."""
    pair.type(
        "state = {'w': torch.rand(1000, 1000)}\nstate['row'] = state['w'][3]\nstate['t'] = state['w'].t()"
    )
    assert pair.run("state['row'].data_ptr() - state['w'].data_ptr()") == 3 * 4000
    assert 4_000_000 <= pair.preparation.copied_nbytes["state"] < 4_010_000
    pair.run("state")
    assert pair.sent() == []
    pair.type("state['row'][0] = 5")
    assert float(pair.run("state['t'][0, 3]")) == 5
    assert pair.sent() == ["state"]


def test_a_rank_writes_to_its_own_value(pair):
    """A tensor that was not shared is each rank's own: the notebook keeps its value, and nothing crashes."""
    pair.type("t = torch.zeros(100_000)\nsmall = torch.zeros(3)")
    pair.run("t.add_(1); small.resize_(5).fill_(2)")
    assert not pair.notebook["t"].any()
    assert not pair.notebook["small"].any()
    assert float(pair.run("t.sum()")) == 100_000


@pytest.mark.slow
def test_a_module_arrives_with_tied_weights_and_learns(pair):
    """Parameters and buffers, tied as they were, with gradients of the rank's own."""
    pair.type(MODEL)
    pair.run("model(torch.rand(8, 300)).sum().backward(); torch.optim.SGD(model.parameters(), 0.1).step()")
    assert pair.run("model.a.weight is model.b.weight and model.a.weight.grad is not None")
    assert pair.notebook["model"].a.weight.grad is None
    assert not torch.equal(pair.rank["model"].a.weight, pair.notebook["model"].a.weight)


def test_modules_keep_hooks_modes_and_attributes(pair):
    """What a module has beside parameters arrives, also where its class has ways of its own to be pickled."""
    pair.type(
        MODEL + "class Own(torch.nn.Linear):\n"
        "    def __getstate__(self):\n"
        "        return {**super().__getstate__(), 'sent': True}\n"
        "def hook(module, args, output):\n"
        "    return output + 1000\n"
        "own = Own(2, 2)\nmodel.norm.register_forward_hook(hook)\nmodel.register_buffer('none', None)\n"
        "model.eval()\nmodel.extra = [1, {'a': 2}]\n"
        "model.register_buffer('temporary', torch.ones(3), persistent=False)\n"
        "batch = torch.rand(4, 300)"
    )
    there = pair.run("(model(batch).detach(), model.training, model.extra, list(model.state_dict()))")
    model = pair.notebook["model"]
    assert torch.equal(there[0], model(pair.notebook["batch"]).detach())
    assert there[1:] == (False, [1, {"a": 2}], list(model.state_dict()))
    assert pair.run("own.sent")
    assert pair.run("set(vars(model)), set(vars(model.a))") == (set(vars(model)), set(vars(model.a)))


@pytest.mark.slow
def test_names_with_tensors_in_common_have_them_on_the_ranks(pair):
    """A model and its optimiser: `step` moves the model, whichever cell used which of them first."""
    pair.type(MODEL + "optimiser = torch.optim.SGD(model.parameters(), 0.1)\nweight = model.a.weight")
    step = "before = model.a.weight.clone(); model(torch.rand(8, 300)).sum().backward(); optimiser.step()"
    pair.run(step)
    same = "optimiser.param_groups[0]['params'][0] is model.a.weight"
    assert pair.run(same)
    assert pair.run("not torch.equal(model.a.weight, before)")
    assert pair.run(f"{same} and weight is model.b.weight")
    assert pair.notes == (
        "model was sent again: it has tensors in common with weight",
        "optimiser was sent again: it has tensors in common with weight",
        "model was replaced: the notebook has changed it, and what this rank changed in it is lost",
        "optimiser was replaced: the notebook has changed it, and what this rank changed in it is lost",
    )
    pair.run(f"{same} and weight is model.b.weight")
    assert pair.sent() == []
    pair.run("weight")
    pair.type("optimiser.param_groups[0]['lr'] = 0.2")
    pair.run("optimiser")
    assert pair.sent() == ["optimiser"]
    assert pair.run(same), "they came with different cells"
    assert sorted(pair.sent()) == ["model", "optimiser"]
    pair.type("model.eval()")
    assert pair.run(f"{same} and not model.training")
    pair.run("model.train(); optimiser")
    assert pair.sent() == []


@pytest.mark.slow
def test_a_shared_model_and_its_optimiser_learn_together(pair):
    """The optimiser of a shared model finds the gradients on the rank; the notebook sees the steps."""
    pair.type(MODEL + "optimiser = torch.optim.SGD(model.parameters(), 0.1)")
    before = pair.notebook["model"].a.weight.detach().clone()
    pair.run("model(torch.rand(8, 300)).sum().backward(); optimiser.step()", share=["model"])
    assert not torch.equal(pair.notebook["model"].a.weight, before)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11, once a process
def test_what_torch_takes_apart_itself_travels_too(pair):
    """Subclasses, attributes, conjugated and sparse tensors, storages and optimisers arrive equal."""
    pair.type(
        "class Mine(torch.Tensor): pass\n"
        "mine = torch.arange(100_000.).as_subclass(Mine)\nmine.note = 'kept'\n"
        "conj = (torch.ones(50_000) * 1j).conj()\n"
        "sparse = torch.eye(300).to_sparse()\n"
        "storage = torch.arange(100_000).untyped_storage()\n"
        "p = torch.nn.Parameter(torch.rand(300, 300))\n"
        "adam = torch.optim.Adam([p])\np.sum().backward()\nadam.step()\n"
    )
    assert pair.run("type(mine).__name__, mine.note, float(mine[-1])") == ("Mine", "kept", 99_999.0)
    assert pair.run("conj.is_conj(), complex(conj[1])") == (True, -1j)
    assert float(pair.run("sparse.to_dense().sum()")) == 300
    assert pair.run("storage.nbytes(), storage[8]") == (800_000, 1)
    before = pair.notebook["adam"].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(pair.run("adam.state_dict()['state'][0]['exp_avg']"), before)
    assert max(v for k, v in pair.preparation.copied_nbytes.items()) < 1_200_000


def test_a_shared_module_is_the_same_memory_in_place(pair):
    """`nbp.share(module)` keeps module, parameters, ties and optimiser; all processes see writes."""
    pair.type(MODEL + "optimiser = torch.optim.SGD(model.parameters(), 0.1)\nimport nbparallel as nbp")
    model = pair.notebook["model"]
    before, weight = copy.deepcopy(model.state_dict()), model.a.weight
    assert share_tensors(model, pair.kernel_store) is model
    assert (
        model.a.weight is weight is model.b.weight is pair.notebook["optimiser"].param_groups[0]["params"][0]
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    pair.run("with torch.no_grad(): model.a.weight.fill_(7); model.norm.running_mean.fill_(8)")
    assert pair.rank["model"].b.weight.is_shared()
    assert model.b.weight[5, 5].item() == 7
    assert model.norm.running_mean[0].item() == 8
    pair.type("model.a.weight.data.fill_(9)")
    assert pair.run("model.b.weight[0, 0].item()") == 9
    assert pair.sent() == [], "content is no change of what is shared"
    assert sum(pair.preparation.shared_nbytes.values()) >= 360_000
    del model, weight


@pytest.mark.parametrize("length", [3, 100_000])
def test_what_torch_has_shared_is_the_same_memory(pair, length):
    """After `share_memory_()`: views and modules included; arrays over it stay valid; sent once."""
    pair.type(
        f"t = torch.zeros({length}).share_memory_()\nview = t[1:]\nm = torch.nn.Linear(4, 4).share_memory()"
    )
    array = pair.notebook["t"].numpy()
    pair.run("t[1] = 5; view[1] = 6; m.weight.data.fill_(7)")
    assert array[1] == 5
    assert array[2] == 6
    assert pair.notebook["m"].weight[3, 3].item() == 7
    assert pair.run("t.is_shared() and view.is_shared() and m.bias.is_shared()")
    pair.run("t, view, m")
    assert pair.sent() == []
    del array


@pytest.mark.slow
def test_what_torch_has_shared_under_a_name_is_the_same_memory():
    """Torch's strategy `file_system`, whose files have a name and a header.

    In a process of its own: torch starts a manager, which outlives the test.
    """
    code = (
        "import torch, torch.multiprocessing as mp\n"
        "from tests.session.names.pair import Pair\n"
        "mp.set_sharing_strategy('file_system')\n"
        "pair = Pair()\n"
        "pair.notebook['t'] = t = torch.zeros(1000).share_memory_()\n"
        "pair.run('t[1] = 5')\n"
        "assert t[1] == 5, t\n"
        "pair.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_share_memory_leaves_our_memory_where_it_is(pair):
    """Torch's `share_memory_()` of what is shared already does nothing, as of its own memory."""
    pair.notebook["t"] = share_tensors(torch.zeros(1000), pair.kernel_store)
    before = pair.notebook["t"].data_ptr()
    assert pair.notebook["t"].share_memory_().data_ptr() == before
    assert pair.run("t.share_memory_().is_shared()")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_copies_of_shared_tensors_are_private():
    """`clone`, `deepcopy`, and what `torch.save` wrote are ordinary tensors."""
    for dtype in (torch.float32, torch.uint16):
        t = nbp.share(torch.ones(10, dtype=dtype))
        file = io.BytesIO()
        torch.save({"t": t}, file)
        file.seek(0)
        loaded = torch.load(file)["t"]
        for other in (t.clone(), copy.deepcopy(t), loaded):
            assert not other.is_shared()
            assert not nbp.is_shared(other)
            assert torch.equal(other, t)
        del t


def test_sharing_in_place_leaves_what_it_cannot_find_and_says_so():
    """A view that was made before keeps valid, old memory, with a warning; an array of numpy too."""
    t = torch.arange(6.0)
    array, view = t.numpy(), t[2:]
    with pytest.warns(RuntimeWarning, match=r"a tensor of shape \(6,\) \(24 B\) moved into shared memory"):
        assert nbp.share(t) is t
    t[3] = 9
    assert array[3] == view[1] == 3
    t = nbp.share(torch.arange(6.0).reshape(2, 3))  # no warning: nothing else views it
    assert nbp.is_shared(t)
    assert nbp.share(t) is t


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.empty(3, device="meta"), "no data"),
        (lambda: torch.nn.LazyLinear(3), "pass a batch through it first"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), "no data"),
        (lambda: [torch.ones(2)], "not a list of them"),
        (lambda: {"a": torch.ones(2)}, "not dict"),
    ],
)
def test_what_has_no_memory_of_the_cpu_is_refused(make, says):
    """One error that says what to do, and nothing is moved."""
    with pytest.raises(nbp.NotAnArrayError, match=says):
        nbp.share(make())


def test_inference_tensors_are_refused():
    """Torch gives them no other memory."""
    with torch.inference_mode():
        t = torch.ones(3)
    with pytest.raises(nbp.NotAnArrayError, match="clone"):
        nbp.share(t)


def test_share_magic_moves_tensors_and_other_names_of_their_memory(pair):
    """Names of views move with it; a list that holds another view, and an array, are named."""
    pair.type("t = torch.zeros(10)\nview = t[5:]\nlost = [t[1:]]\narray = t.numpy()")
    pair.run("t[0] = 1; view[0] = 2", share=["t"])
    assert any("t moved into shared memory, and a list, a view or" in note for note in pair.notes), pair.notes
    assert any("array is an array over the old memory of t" in note for note in pair.notes)
    assert "ranks may write t from now on" + LATER in pair.notes
    assert pair.notebook["t"].tolist() == [1, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert pair.notebook["view"][0] == 2
    assert not pair.notebook["array"].any()
    pair.run("t", share=["t"])
    assert pair.notes == ()


def test_a_tensor_over_a_shared_array_is_the_same_memory(pair):
    """`torch.from_numpy(nbp.zeros(…))` is shared; one over an array that ranks may only read is a copy."""
    pair.notebook["a"] = pair.kernel_store.zeros(1000, for_all=True)
    pair.notebook["b"] = np.zeros(1000)
    pair.type("t = torch.from_numpy(a)")
    pair.run("b")
    pair.type("u = torch.from_numpy(b)")
    pair.run("t[3] = 5; u[3] = 5")
    assert pair.notebook["a"][3] == 5
    assert pair.notebook["b"][3] == 0


def test_nothing_asks_for_torch_before_the_user_imports_it():
    """Names, `share` and `is_shared` of arrays import no torch."""
    code = (
        "import sys, numpy as np, nbparallel as nbp\n"
        "from tests.session.names.pair import Pair\n"
        "p = Pair(); p.notebook.update(a=np.ones(9), d={'a': np.ones(100_000)}); p.run('a, d', share=['a'])\n"
        "assert nbp.is_shared(nbp.share(np.ones(3)))\n"
        "p.close(); assert 'torch' not in sys.modules, 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
