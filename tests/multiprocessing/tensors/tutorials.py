"""The programs of tutorials on torch.multiprocessing, with one line changed: the import.

What torch does not have (``torch.ones(..., share_memory=True)``) is written as what it stands for, and loops
are shorter.  Each is a script with the guard that tutorials have; a notebook runs it as a cell.
"""

IMPORTS = """
import os
import time
import torch
import nbparallel as nbp
import nbparallel.multiprocessing as mp
torch.set_num_threads(1)
"""

STRATEGIES = """
def show(tensor, answers):
    tensor += 1
    answers.put((mp.get_sharing_strategy(), nbp.is_shared(tensor)))

if __name__ == "__main__":
    assert mp.get_sharing_strategy() == "file_descriptor"
    started = []
    assert {"file_descriptor", "file_system", "file_region", "mmap"} <= set(mp.get_all_sharing_strategies())
    for name in ("file_system", "mmap", "file_region", "file_descriptor"):
        mp.set_sharing_strategy(name)
        assert mp.get_sharing_strategy() == name
        tensor = nbp.share(torch.ones(3, 4))
        answers = mp.Queue()
        process = mp.Process(target=show, args=(tensor, answers))
        process.start()
        started.append((name, process, tensor, answers))
    for name, process, tensor, answers in started:
        assert answers.get(timeout=60) == (name, True)
        process.join()
        assert process.exitcode == 0 and (tensor == 2).all()
"""

TIMES = """
def add(tensor, times):
    for _ in range(times):
        tensor.add_(1)

if __name__ == "__main__":
    for name in ("file_system", "file_descriptor"):
        mp.set_sharing_strategy(name)
        began = time.perf_counter()
        tensor = nbp.share(torch.zeros(1_000_000))
        process = mp.Process(target=add, args=(tensor, 10))
        process.start()
        process.join()
        assert process.exitcode == 0 and (tensor == 10).all(), tensor
        assert 0 < time.perf_counter() - began < 60
"""

PRODUCER_AND_CONSUMER = """
def producer(queue):
    queue.put(torch.full((100_000,), 7.0))
    queue.put(torch.full((3,), 8.0).share_memory_())

def consumer(queue, total):
    total[0] = queue.get().sum() + queue.get().sum()

if __name__ == "__main__":
    queue, total = mp.Queue(), torch.zeros(1).share_memory_()
    first = mp.Process(target=producer, args=(queue,))
    first.start()
    first.join()  # the consumer begins when the producer has ended
    second = mp.Process(target=consumer, args=(queue, total))
    second.start()
    second.join()
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert total.item() == 700_024, total
"""

SHARING = """
def fill(tensor, rank):
    tensor[rank] = rank + 1

def double(tensor):
    return tensor * 2

def answer(given, results):
    tensor = given.get()
    tensor += 1
    results.put(tensor)

def work(rank, tensor, factor):
    tensor[rank] = factor * rank

if __name__ == "__main__":
    tensor = torch.zeros(2)
    tensor.share_memory_()
    assert tensor.is_shared() and tensor[1:].is_shared() and not tensor.clone().is_shared()
    processes = [mp.Process(target=fill, args=(tensor, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert tensor.tolist() == [1, 2], tensor
    given, results = mp.Queue(), mp.Queue()
    process = mp.Process(target=answer, args=(given, results))
    process.start()
    given.put(tensor)
    assert results.get(timeout=60).tolist() == tensor.tolist() == [2, 3]
    process.join()
    with mp.Pool(2) as pool:
        assert [int(t[0]) for t in pool.map(double, [torch.full((2,), n) for n in range(4)])] == [0, 2, 4, 6]
    mp.spawn(work, args=(tensor, 10), nprocs=2, join=True)
    assert tensor.tolist() == [0, 10], tensor
"""

HOGWILD = """
from torch.utils.data import DataLoader, TensorDataset

def train(model, inputs, targets, rank, epochs):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    batches = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()

if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.rand(400, 1) * 4 - 2
    targets = 2 * inputs + 3 + 0.1 * torch.randn(400, 1)
    model = torch.nn.Linear(1, 1)
    model.share_memory()
    processes = [mp.Process(target=train, args=(model, inputs, targets, rank, 20)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert abs(model.weight.item() - 2) < 0.1 and abs(model.bias.item() - 3) < 0.1, model.state_dict()
    assert torch.nn.functional.mse_loss(model(inputs), targets) < 0.03
"""

DISTRIBUTED = """
import nbparallel.distributed as dist

def run(rank, size, found):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    handle = dist.isend(torch.ones(2) * rank, dst=1 - rank)
    other = torch.zeros(2)
    dist.recv(other, src=1 - rank)
    handle.wait()
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    found[rank] = tensor[0] + other[0]
    dist.destroy_process_group()

if __name__ == "__main__":
    found = torch.zeros(2).share_memory_()
    processes = [mp.Process(target=run, args=(rank, 2, found)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert found.tolist() == [3, 2], found
    mp.spawn(run, args=(2, found.zero_()), nprocs=2)
    assert found.tolist() == [3, 2], found
"""

PROGRAMS = {
    "strategies": STRATEGIES,
    "times": TIMES,
    "producer and consumer": PRODUCER_AND_CONSUMER,
    "sharing": SHARING,
    "hogwild": HOGWILD,
    "distributed": DISTRIBUTED,
}
