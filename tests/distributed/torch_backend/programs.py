"""Programs of torch.distributed that know nothing of nbparallel: run over gloo and over ours."""

COLLECTIVES = '''
import itertools

rank, size = td.get_rank(), td.get_world_size()
INTEGERS = ("uint8", "int8", "int32", "int64")
REDUCED = {
    "float": ("SUM", "PRODUCT", "MIN", "MAX"),
    "int": ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"),
}


def bits(x):
    """Return a tensor's bytes, dtype and shape."""
    content = x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.ndim else x.item()
    return str(x.dtype), tuple(x.shape), content


def value(seed, shape, dtype):
    """Return small whole numbers, which all dtypes and sums hold exactly."""
    count = 1
    for n in shape:
        count *= n
    x = torch.arange(count).add_(seed).remainder_(3).add_(1).reshape(shape)
    return x.to(getattr(torch, dtype))


def done(work, asynchronous):
    if asynchronous:
        assert work.wait() is not False
        assert td.get_backend() == "gloo" or work.is_completed()


def collectives(dtype, shape, group, asynchronous):
    """Return what every collective gives."""
    seen = {}
    me, n = td.get_rank(group), td.get_world_size(group)
    ranks = td.get_process_group_ranks(group) if group is not None else list(range(size))
    place = {"group": group, "async_op": asynchronous}

    def like(seed=0):
        return value(seed, shape, dtype)

    for name in REDUCED["int" if dtype in INTEGERS else "float"]:
        op = getattr(td.ReduceOp, name)
        x = like(me)
        done(td.all_reduce(x, op, **place), asynchronous)
        seen["all_reduce", name] = bits(x)
        for root in range(n):
            x = like(me)
            done(td.reduce(x, ranks[root], op, **place), asynchronous)
            if me == root:
                seen["reduce", name, root] = bits(x)
    for root in range(n):
        x = like(me if me == root else 7)
        done(td.broadcast(x, ranks[root], **place), asynchronous)
        seen["broadcast", root] = bits(x)
        outs = [like(9) for _ in range(n)] if me == root else None
        done(td.gather(like(me), outs, ranks[root], **place), asynchronous)
        seen["gather", root] = outs and [bits(y) for y in outs]
        x = like(9)
        parts = [like(10 + i) for i in range(n)] if me == root else None
        done(td.scatter(x, parts, ranks[root], **place), asynchronous)
        seen["scatter", root] = bits(x)
    outs = [like(9) for _ in range(n)]
    done(td.all_gather(outs, like(me), **place), asynchronous)
    seen["all_gather"] = [bits(y) for y in outs]
    if shape:
        whole = value(0, (n * shape[0], *shape[1:]), dtype)
        done(td.all_gather_into_tensor(whole, like(me), **place), asynchronous)
        seen["all_gather_into_tensor"] = bits(whole)
        x = like(9)
        done(td.reduce_scatter_tensor(x, value(me, (n * shape[0], *shape[1:]), dtype), **place), asynchronous)
        seen["reduce_scatter_tensor"] = bits(x)
        y = value(9, (n * shape[0], *shape[1:]), dtype)
        done(td.all_to_all_single(y, value(me, (n * shape[0], *shape[1:]), dtype), **place), asynchronous)
        seen["all_to_all_single"] = bits(y)
        sent, came = [i + 1 for i in range(n)], [me + 1] * n
        y = value(9, (sum(came), *shape[1:]), dtype)
        x = value(me, (sum(sent), *shape[1:]), dtype)
        done(td.all_to_all_single(y, x, came, sent, **place), asynchronous)
        seen["all_to_all_single", "splits"] = bits(y)
    x = like(9)
    done(td.reduce_scatter(x, [like(me + i) for i in range(n)], **place), asynchronous)
    seen["reduce_scatter"] = bits(x)
    outs = [like(9) for _ in range(n)]
    done(td.all_to_all(outs, [like(me + i) for i in range(n)], **place), asynchronous)
    seen["all_to_all"] = [bits(y) for y in outs]
    done(td.barrier(**place), asynchronous)
    return seen


def matrix(dtypes, shapes, members, modes):
    """Return what all of them give; `members` is a list of groups, None is the world."""
    seen = {}
    groups = [None if ranks is None else td.new_group(ranks) for ranks in members]
    for dtype, shape, (i, group), asynchronous in itertools.product(dtypes, shapes, enumerate(groups), modes):
        if group != td.GroupMember.NON_GROUP_MEMBER:
            seen[dtype, shape, i, asynchronous] = collectives(dtype, shape, group, asynchronous)
    return seen
'''

MESSAGES = """
import torch.distributed._functional_collectives as functional

rank, size = td.get_rank(), td.get_world_size()
seen = []
right, left = (rank + 1) % size, (rank - 1) % size
x, y = torch.arange(5.0) + rank, torch.zeros(5)
if rank == 0:
    td.send(x, right)
    seen.append(td.recv(y, left))
else:
    seen.append(td.recv(y, left))
    td.send(x, right)
seen.append(y.tolist())
for tag in (3, 1):
    works = [td.isend(x * tag, right, tag=tag), td.irecv(y, left, tag=tag)]
    for work in works:
        work.wait()
    seen.append(y.tolist())
outs = [torch.zeros(5, dtype=torch.int64) for _ in range(2)]
ops = [td.P2POp(td.irecv, outs[0], left), td.P2POp(td.isend, torch.full((5,), rank), right)]
ops += [td.P2POp(td.isend, torch.full((5,), 10 + rank), left), td.P2POp(td.irecv, outs[1], right)]
for work in td.batch_isend_irecv(ops):
    work.wait()
seen.append([out.tolist() for out in outs])
group = td.new_group(list(range(size)))
if rank == 0:
    from_any = set()
    for _ in range(size - 1):
        source = td.recv(y, group=group)
        assert y.tolist() == [float(source)] * 5
        from_any.add(source)
    seen.append(sorted(from_any))
else:
    td.send(torch.full((5,), float(rank)), 0, group=group)
objects = [None] * size
td.all_gather_object(objects, {"rank": rank, "x": [rank] * rank})
seen.append(objects)
got = [None] * size if rank == 1 else None
td.gather_object(("from", rank), got, dst=1)
seen.append(got)
given = [{"a": 1}, "b", 3] if rank == 0 else [None] * 3
td.broadcast_object_list(given, src=0)
seen.append(given)
one = [None]
td.scatter_object_list(one, [f"for {i}" for i in range(size)] if rank == size - 1 else None, src=size - 1)
seen.append(one)
if rank == 0:
    td.send_object_list(["x", 2], dst=1)
elif rank == 1:
    objects = [None, None]
    seen.append((td.recv_object_list(objects, src=0), objects))
tensors = [torch.full((2,), float(rank)), torch.full((3,), 2.0 * rank)]
with td._coalescing_manager():
    for tensor in tensors:
        td.all_reduce(tensor)
seen.append([tensor.tolist() for tensor in tensors])
for asynchronous in (False, True):
    tied, whole = torch.full((2,), rank + 1.0), torch.arange(6.0) + rank
    for tensors in ([tied, tied], [tied, torch.ones(1), tied], [whole[:4], whole[2:]], [whole, whole[1::2]]):
        work = td.all_reduce_coalesced(tensors, async_op=asynchronous)
        if asynchronous:
            work.wait()
        seen.append([tensor.tolist() for tensor in tensors])
group = td.group.WORLD
x, parts = torch.full((2,), rank + 1.0), [torch.zeros(2) for _ in range(size)]
group.allreduce(x).wait()
seen.append(x.tolist())
group.allreduce(x, td.ReduceOp.MAX).wait()
group.allreduce([x], op=td.ReduceOp.PRODUCT).wait()
seen.append(x.tolist())
x = torch.full((2,), rank + 1.0)
group.broadcast(x, 1).wait()
group.allgather(parts, x + rank).wait()
seen.append([x.tolist(), [part.tolist() for part in parts]])
group.reduce(x, 0, td.ReduceOp.SUM).wait()
if rank == 0:
    seen.append(x.tolist())
group.reduce_scatter(x, [part + rank for part in parts]).wait()
seen.append(x.tolist())
group.scatter(x, [part + 5 for part in parts] if rank == 0 else [], 0).wait() if rank == 0 else group.scatter(
    [x], [], td.ScatterOptions()
).wait()
seen.append(x.tolist())
group.barrier().wait()
for shape in ((1, 0), (0,), (0, 3), (2, 0, 3)):
    part, empty = torch.zeros(shape), torch.zeros(size * shape[0], *shape[1:])
    td.reduce_scatter_tensor(part, empty)
    td.all_gather_into_tensor(empty, part)
    world = td.group.WORLD
    found = functional.reduce_scatter_tensor(empty, "sum", 0, world)
    several = functional.reduce_scatter_tensor_coalesced([empty] * 2, "sum", [0, 0], world)
    seen.append([tuple(found.shape), *(tuple(x.shape) for x in several)])
td.barrier()
td.monitored_barrier()
seen
"""
