"""Tensors on the CPU go as arrays do; torch's own cases of `test_multiprocessing` in our words."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.multiprocessing.messages.test_semantics import ECHO, END
from tests.multiprocessing.programs import run_program
from tests.sharing.tensors.optional import needs_torch

pytestmark = [needs_torch, pytest.mark.matrix(cover=(), size=1)]  # each start method by turns
# In a forked child torch's own parallel loops may wait for threads that the fork did not copy: one thread.
TORCH = "import torch\ntorch.set_num_threads(1)\n"


def run(body: str, folder: Path, method: str) -> None:
    """Run `body` beside a child that calls what it is asked to."""
    run_program(TORCH + ECHO + textwrap.dedent(body) + END, folder, method)


@pytest.mark.slow
def test_a_private_tensor_is_copied_once(tmp_path: Path, method: str) -> None:
    """It arrives in shared memory from 256 KiB on; the sender's stays private and unchanged."""
    run(
        """
        def look(x):
            with torch.no_grad():
                x[0] = 99
            return nbp.is_shared(x), type(x).__name__, x.dtype, x.requires_grad, x[0].item() + x[-1].item()

        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            large, small = torch.ones(131_072, dtype=dtype), torch.ones(100, dtype=dtype)
            assert ask(look, large) == (True, "Tensor", dtype, False, 100), dtype
            assert ask(look, small) == (False, "Tensor", dtype, False, 100), dtype
            assert large[0] == small[0] == 1 and not nbp.is_shared(large)
        weight = torch.nn.Parameter(torch.ones(131_072))
        assert ask(look, weight) == (True, "Parameter", torch.float32, True, 100)
        result = ask(lambda n: torch.arange(n), 100_000)  # a result as well
        assert nbp.is_shared(result) and result[-1] == 99_999
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_shared_tensor_is_the_same_memory(tmp_path: Path, method: str) -> None:
    """However it was shared, through every carrier, and back."""
    run(
        """
        def add(x):
            x += 1
            return x

        given = torch.zeros(4).share_memory_(), nbp.share(torch.zeros(4)), nbp.share(torch.zeros(70_000))
        for shared in given:
            for number in range(1, 4):
                back = ask(add, shared)
                assert shared[0] == number == back[0], (shared, back)
            back += 1
            assert shared[0] == 4
            with ctx.Pool(1) as pool:
                pool.apply(add, (shared,))
            other = ctx.Process(target=add, args=(shared,))
            other.start()
            other.join()
            reading, writing = ctx.Pipe(duplex=False)
            writing.send(shared)
            reading.recv().add_(1)
            assert shared[0] == 7, shared
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_what_is_preserved(tmp_path: Path, method: str) -> None:
    """Views, tied storages, strides, shapes without elements, and modules, private and shared."""
    run(
        """
        def look(message):
            a, part, again = message["a"], message["part"], message["again"]
            a[1] = 5.0
            return part.tolist(), a is again, a.data_ptr() + 4 == part.data_ptr()

        shared = torch.zeros(4).share_memory_(), nbp.share(torch.zeros(4))
        for a in (torch.zeros(4), torch.zeros(131_072), *shared):
            assert ask(look, dict(a=a, part=a[1:3], again=a)) == ([5.0, 0.0], True, True), a
        for x in (
            torch.empty(0), torch.empty(0, 3), torch.tensor(3.0), torch.ones(1).expand(5),
            torch.ones(600, 400).t(), torch.ones(4)[::2], torch.zeros(2, 3, 4).permute(2, 0, 1),
            torch.ones(2, dtype=torch.bool), torch.ones(3, dtype=torch.complex64),
        ):
            back = ask(lambda x: x, x)
            assert torch.equal(x, back) and (x.dtype, x.shape) == (back.dtype, back.shape), (x, back)
            assert x.stride() == back.stride(), (x.stride(), back.stride())
        model = torch.nn.Sequential(torch.nn.Linear(600, 300), torch.nn.Linear(300, 600))
        model[1].weight = torch.nn.Parameter(model[0].weight.t())
        private = ask(lambda m: m, model)
        assert all(map(torch.equal, model.parameters(), private.parameters()))
        nbp.share(model)

        def train(m):
            with torch.no_grad():
                for p in m.parameters():
                    p.fill_(2.0)
        ask(train, model)
        assert all((p == 2).all() for p in model.parameters())
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_gradients_stay(tmp_path: Path) -> None:
    """A tensor that autograd has computed arrives as a leaf that requires a gradient, without its history."""
    run(
        """
        made = torch.ones(3, requires_grad=True) * 2
        back = ask(lambda x: x, made)
        assert back.is_leaf and back.requires_grad and back.tolist() == [2, 2, 2]
        """,
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_values_that_are_not_what_lies_in_memory(tmp_path: Path, method: str) -> None:
    """Conjugated, negated and quantised tensors keep their values, others their attributes, in every way."""
    # torch is about to give up quantised tensors, and says so in every process
    quiet = "import os, warnings\nos.environ['PYTHONWARNINGS'] = 'ignore'\nwarnings.simplefilter('ignore')\n"
    body = """
        class Holder(torch.nn.Module):
            def __init__(self, x):
                super().__init__()
                self.register_buffer("x", x)

        z = torch.randn(300, 400, dtype=torch.complex64)
        tagged = torch.ones(3)
        tagged.tag = "mine"
        given = [
            z.conj(), z.mH, z.conj().imag, z[:2, :2].conj(), torch._neg_view(z), torch._neg_view(z.conj()),
            torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.quint8),
            torch.quantize_per_tensor(torch.randn(1000, 1000), 0.1, 3, torch.qint8), tagged,
        ]
        plain = [x.dequantize() if x.is_quantized else x.resolve_conj().resolve_neg() for x in given]

        def right(x, k):
            found = x.dequantize() if x.is_quantized else x
            return torch.equal(found, plain[k]) and vars(x) == vars(given[k])

        reading, writing = ctx.Pipe(duplex=False)
        with ctx.Pool(1) as pool, mp.Executor(1, ctx) as executor:
            for k, x in enumerate(given):
                assert right(ask(lambda x: x, x), k), k
                writing.send(x)
                assert right(reading.recv(), k), k
                assert right(pool.apply(lambda h: h.x, (Holder(x),)), k), k
                assert executor.submit(right, x, k).result(), k
        """
    run_program(quiet + TORCH + ECHO + textwrap.dedent(body) + END, tmp_path, method)
