"""What students typically answer to the exercises, and the words that they then read.

For each notebook its exercises in order, for each exercise pairs: a cell, and words of the check's message.
Words that begin with ``!`` are of the cell's own error.  The cell `START` is the one that is to be changed.
"""

START = ""

_HALO = """%%parallel -o partners
{neighbours}
v = photo[dist.local_slice(len(photo))].copy()
halo = np.zeros((2, *v.shape[1:]))
begun = irecv(halo[{up}], src=above), irecv(halo[{down}], src=below)
send(v[0], above)
send(v[-1], below)
for row in begun:
    row.wait()
halo[:, 0]"""
_ROWS = "rows = nbp.zeros((4, 256), dtype=int)\n%parallel {} = np.bincount({}.ravel(), minlength=256)"
_RACE = """%%parallel --check-races
if rank == 0:
    counter[0] = 0
barrier()
{}"""
_NEWS = """%%parallel -o spread
news, sent = ("it works" if rank == 0 else None), 0
{}
news, sent"""
_WEIGHT = """%%parallel -o m
mine = dist.shard(np.arange(10.0))
m = np.array([mine.{}])
dist.average_gradients(m{})
m[0]"""
_LOCAL = """%%parallel -o local
my_x, my_y = dist.shard(x), dist.shard(y)
model = np.zeros(2)
for step in range(300):
    model -= 0.02 * gradient(model, my_x, my_y)
    if {}:
        all_reduce(model{})
model"""
_FILE = """import tempfile

with tempfile.TemporaryDirectory() as folder:
    path = folder + "/rows.npy"
    rows = nbp.from_file(path, "f8", (2, 3), mode="w+")
    with nbp.Session(2) as session:
        session.run("{}", namespace={{"rows": rows}})
    kept = np.load(path)
    del rows"""
_DAYS = """before = {{s.segment for s in nbp.segments()}}
days = [nbp.full(500, day) for day in range(2000)]
held = {}"""
_RING = """%%parallel -o squares
left, right = (rank - 1) % world_size, (rank + 1) % world_size
send({}, dst={})
got = recv(src={})
{}"""
_TILES = '''answer = nbp.zeros(len(tiles), int)
with nbp.Session(4) as session:
    session.run("""
some = pieces[::40]
mine = dist.local_slice(len(tiles))
far = (some**2).sum(axis=1) - 2 * tiles[mine] @ some.T
{}
""", namespace={{"pieces": pieces, "tiles": tiles, "answer": answer}})'''
_RIGHT = """%%parallel -o right
x, y = dist.shard(images[1500:]), dist.shard(labels[1500:])
with torch.no_grad():
    guess = hogwild(x).argmax(1)
{}"""

_SUMMED = "%%parallel -o kept\ny = 10 * rank + np.arange(4)\n{}\ny"
_FAVOURITE = "%%parallel -o favourites\nown = dist.shard(labels[:1200])\nint({})"
_SHIFTED = "%%parallel -o shifted\ndist.strict_sync(True)\nx = 10 * rank + np.arange(4)\n{}"
_CONTRAST = """%%parallel -o contrast
from sklearn.datasets import load_sample_image
rows = dist.shard(load_sample_image("flower.jpg"))
{}"""
_TOTAL = "%%parallel\nmine = [5.0, 7.0, None, 9.0][rank]\ntotal = {}"
_MINE = "%%parallel -o mine\n[n for n in range(ROWS) if {} == rank]"
_NET = "%%parallel\n{}"

WRONG: dict[str, list[list[tuple[str, str]]]] = {
    "01-hello-ranks": [
        [
            (START, "rank 3 keeps its own"),
            (_SUMMED.format("y = reduce(y, dst=0)"), "is None on ranks 1 to 3"),
            (_SUMMED.format("reduce(y, dst=3)"), "rank 0 gets the sum"),
            (_SUMMED.format("if rank == 0: reduce(y)"), "!CollectiveMismatchError"),
        ],
        [
            (START, "is not the most frequent"),
            (_FAVOURITE.format("own.max()"), "is not the most frequent"),
            (_FAVOURITE.format("np.bincount(own).max()"), "is not the most frequent"),
            (_FAVOURITE.format("np.bincount(labels[:1200]).argmax()"), "is not the most frequent"),
        ],
    ],
    "02-shared-memory": [
        [
            (START, "a rank has counted nothing"),
            (_ROWS.format("rows[rank]", "grey"), "not every row of"),
            (_ROWS.format("rows[0]", "dist.shard(grey)"), "a rank has counted nothing"),
            (_ROWS.format("rows", "dist.shard(grey)"), "a rank has counted nothing"),
        ],
        [
            (START, "data"),
            (_RACE.format("counter[0] += (dist.shard(grey) > 200).sum()"), "data"),
            (_RACE.format("seen = counter[0]\ncounter[0] = seen + (dist.shard(grey) > 200).sum()"), "data"),
            (_RACE.format("for n in (dist.shard(grey) > 200).sum(axis=1):\n    counter[0] += n"), "data"),
        ],
    ],
    "03-send-and-receive": [
        [
            (START, "each from its right"),
            (_SHIFTED.format("sendrecv(x, dst=right, src=left)"), "each from its right"),
            (_SHIFTED.format("send(x, left)\nrecv(src=right)"), "!DeadlockError"),
            (_SHIFTED.format("sendrecv(x, dst=left, src=left)"), "!DeadlockError"),
        ],
        [
            (START, "above rank 0"),
            (
                _HALO.format(
                    neighbours="above, below = dist.grid(world_size, periodic=True).shift(axis=0)",
                    up=1,
                    down=0,
                ),
                "above rank 0",
            ),
            (
                _HALO.format(neighbours="above, below = (rank + 1) % 4, (rank - 1) % 4", up=0, down=1),
                "above rank 0",
            ),
            (_HALO.format(neighbours="above, below = rank - 1, rank + 1", up=0, down=1), "!rank"),
        ],
    ],
    "04-collectives": [
        [
            (START, "ranks differ"),
            (
                _CONTRAST.format("all_reduce(rows.min()), all_reduce(rows.max())"),
                "not those of the whole photo",
            ),
            (_CONTRAST.format("reduce(rows.min(), op='min'), reduce(rows.max(), op='max')"), "ranks differ"),
            (_CONTRAST.format("all_reduce(rows.max(), 'min'), all_reduce(rows.min(), 'max')"), "whole photo"),
        ],
        [
            (START, "the ranks sent"),
            (_NEWS.format("news = broadcast(news)"), "the ranks sent"),
            (
                _NEWS.format(
                    "if rank: news = recv(src=rank - 1)\nif rank < 3: send(news, rank + 1); sent += 1"
                ),
                "the ranks sent",
            ),
            (_NEWS.format("if rank == 0: send(news, 1); sent = 2\nif rank == 1: recv(src=0)"), "no news"),
        ],
    ],
    "05-training": [
        [
            (START, "each mean counts by its rows"),
            (_WEIGHT.format("mean()", ", weight=10"), "each mean counts by its rows"),
            (_WEIGHT.format("mean()", ", weight=1 / len(mine)"), "each mean counts by its rows"),
            (_WEIGHT.format("sum()", ""), "each mean counts by its rows"),
        ],
        [
            (START, "average after every tenth step"),
            (_LOCAL.format("step % 10 == 0", ', "avg"'), "average after every tenth step"),
            (_LOCAL.format("step == 10", ', "avg"'), "average after every tenth step"),
            (_LOCAL.format("step % 10 == 9", ""), "not near the best line"),
        ],
    ],
    "06-sharing-strategies": [
        [
            (START, "the ranks have written nothing"),
            (_FILE.format("rows[rank] = 1"), "row r holds r"),
            (_FILE.format("rows[:, rank] = rank"), "row r holds r"),
            (_FILE.format("rows = rank"), "the ranks have written nothing"),
        ],
        [
            (START, "count the segments"),
            (_DAYS.format("len(days)"), "count the segments"),
            (_DAYS.format("len(nbp.segments())"), "new segments only"),
            (_DAYS.format("len({s.segment for s in nbp.segments()} | before)"), "new segments only"),
        ],
    ],
    "07-when-things-go-wrong": [
        [
            (START, "!DeadlockError"),
            (_RING.format("rank * rank", "right", "left", "rank * rank"), "each rank has its own square"),
            (_RING.format("rank * rank", "left", "right", "got"), "from the left"),
            (_RING.format("rank", "right", "left", "got"), "from the left"),
        ],
        [
            (START, "!CollectiveMismatchError"),
            (_TOTAL.format("all_reduce(mine or 1.0)"), "not 22.0"),
            (_TOTAL.format("all_reduce(mine or 0.0, 'avg')"), "not 5.25"),
            (_TOTAL.format("reduce(mine or 0.0, dst=0)"), "not None"),
        ],
        [
            (START, "!ReadOnlyArrayError"),
            ("%%parallel --share results\nresults[0] = 10 * rank", "the array holds"),
            ("%%parallel\nresults = 10 * rank", "the array holds"),
            ("%%parallel -o results\n10 * rank", "do not assign the name"),
        ],
    ],
    "08-measuring": [
        [
            (START, "rank 1 begins with"),
            (_MINE.format("n // 20"), "rank 1 begins with"),
            (_MINE.format("n // 8"), "each row needs one owner"),
            (_MINE.format("n % 8"), "each row needs one owner"),
        ],
        [
            (START, "what is left for n = infinity"),
            ("needed, limit = 8, 20", "for n = 8"),
            ("needed, limit = 12, 20", "for n = 12"),
            ("needed, limit = 13, 19", "what is left for n = infinity"),
        ],
    ],
    "09-mosaic": [
        [
            (START, "the ranks have written nothing"),
            (_TILES.format("answer[mine] = far.argmin(axis=1)"), "40 times the index"),
            (_TILES.format("answer[mine] = 40 * far.argmax(axis=1)"), "right for"),
            (_TILES.format("answer[:] = 40 * far.argmin(axis=1)"), "!ValueError"),
        ],
        [
            (START, "every byte is read once"),
            ("work_way = pieces.nbytes / 1e6\ndata_way = work_way / 4", "every byte is read once"),
            ("data_way = work_way = pieces.nbytes / 1e6", "every byte is read by four ranks"),
            ("data_way, work_way = 611, 4 * 4 * 611", "every byte is read by four ranks"),
        ],
    ],
    "10-torch": [
        [
            (START, "DifferentDataError"),
            (_NET.format("torch.manual_seed(rank)\nnet = torch.nn.Linear(64, 10)"), "DifferentDataError"),
            (_NET.format("net = torch.nn.Linear(64, 10)\ntorch.manual_seed(1)"), "DifferentDataError"),
            (
                _NET.format(
                    "torch.manual_seed(rank)\nnet = torch.nn.Linear(64, 10)\nbroadcast(net.bias.data, src=0)"
                ),
                "DifferentDataError",
            ),
        ],
        [
            (START, "each rank counted its own"),
            (_RIGHT.format("reduce(int((guess == y).sum()))"), "each rank counted its own"),
            (_RIGHT.format("all_reduce(int((guess == y).sum()), 'avg')"), "of 297, not"),
            (_RIGHT.format("all_reduce(len(guess))"), "of 297, not"),
        ],
    ],
}
"""Notebook → exercise → wrong answers."""
