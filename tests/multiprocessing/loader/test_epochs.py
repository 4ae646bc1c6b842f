"""Any loader: each sample once, equal to 0 workers; nothing is left of iterations that end in any way."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.multiprocessing.loader.test_loader_workers import run

pytestmark = [pytest.mark.slow, pytest.mark.matrix(cover=(), size=1)]  # each start method by turns


@pytest.mark.time_limit(180)
def test_any_loader_gives_what_it_gives_without_workers(tmp_path: Path, method: str) -> None:
    """Whatever its length, batches, order, number of workers and of batches ahead, in two epochs."""
    run(
        f"""
        choose = random.Random({random.randrange(10**6)})
        for round in range(12 if METHOD == "spawn" else 30):
            length, size = choose.choice([0, 1, 7, 24]), choose.choice([1, 2, 5, 24, 30])
            kind = choose.choice(["order", "shuffle", "sampler", "batch_sampler", "none"])
            seed, ordered = choose.randrange(10**6), choose.random() < 0.7
            options = dict(seed=seed, batch_size=size, drop_last=choose.random() < 0.5, in_order=ordered)
            if kind == "shuffle":
                options["shuffle"] = True
            if kind == "sampler":
                options["sampler"] = choose.sample(range(length), length // 2)
            if kind == "batch_sampler":
                options["batch_sampler"] = [[k] * choose.randrange(1, 4) for k in range(length)]
                options.update(batch_size=1, drop_last=False)
            if kind == "none":
                options.update(batch_size=None, drop_last=False)
            workers = dict(num_workers=choose.randrange(1, 4), prefetch_factor=choose.randrange(1, 4),
                           persistent_workers=choose.random() < 0.5)
            def listed(batch):
                return (batch["x"].tolist(), np.asarray(batch["k"]).tolist(), batch["name"],
                        [np.asarray(r).tolist() for r in batch["r"]])
            here, there = loader(length, **options | dict(num_workers=0)), loader(length, **options | workers)
            assert len(here) == len(there), (options, workers)
            for epoch in range(2):
                expected, found = [listed(b) for b in here], [listed(b) for b in there]
                assert len(expected) == len(here)
                if not ordered:
                    expected, found = sorted(map(repr, expected)), sorted(map(repr, found))
                assert found == expected, (options, workers)
            if kind in ("order", "shuffle") and not options["drop_last"]:
                seen = sorted(k for batch in there for k in batch["k"].tolist())
                assert seen == list(range(length)), (options, workers)
        del here, there
        """,
        tmp_path,
        method,
        limit=150,
    )


@pytest.mark.time_limit(180)
def test_iterations_that_end_in_any_way(tmp_path: Path, method: str) -> None:
    """Left early, abandoned beside another, killed, closed: the next epoch is whole, and nothing is left."""
    run(
        f"""
        choose = random.Random({random.randrange(10**6)})
        made = loader()
        for round in range(8 if METHOD == "spawn" else 30):
            iteration = iter(made)
            for _ in range(choose.randrange(4)):
                batch = next(iteration)
            end = choose.choice(["left", "beside", "killed", "closed", "dropped"])
            if end == "beside":
                other = iter(made)
                next(other)
                del iteration
                assert [int(batch["k"][0]) for batch in other] == list(range(3, 24, 3))
                del other
            elif end == "killed":
                victim = choose.choice(mp.active_children())
                victim.kill()
                victim.join()
                try:
                    left = len(list(iteration))
                except WorkerDiedError as error:
                    assert error.signal_name == "SIGKILL"
            elif end == "closed":
                made.close()
            elif end == "dropped":
                made = loader()
            batch = iteration = victim = None
            found = [int(batch["k"][0]) for batch in made]
            assert found == list(range(0, 24, 3)), (end, found)
            assert len(household.report().processes) <= 8, household.report()
        del made
        """,
        tmp_path,
        method,
        limit=150,
    )


def test_a_loader_in_another_process(tmp_path: Path, method: str) -> None:
    """It travels without its workers, and a worker may use a loader with workers itself."""
    run(
        """
        def count(made):
            return sum(len(batch["k"]) for batch in made)
        made = loader()
        assert count(made) == 24
        with ctx.Pool(1) as pool:
            assert pool.map(count, [made, made]) == [24, 24]
        class Outer:
            def __len__(self):
                return 2
            def __getitem__(self, k):
                return count(loader(6))
        outer = mp.DataLoader(Outer(), num_workers=1, start_method=METHOD)
        assert [batch.tolist() for batch in outer] == [[6], [6]]
        del outer
        del made
        """,
        tmp_path,
        method,
    )


def test_a_supervisor_that_is_killed_and_few_descriptors(tmp_path: Path, method: str) -> None:
    """Batches that are kept need no descriptors; both are errors of their own, the next epoch is whole."""
    run(
        """
        import resource
        def begin(number):
            open(f"begun{number}", "w").close()
        made = loader(300, worker_init_fn=begin)
        iteration = iter(made)
        wait_until(lambda: os.path.exists("begun0") and os.path.exists("begun1"))
        os.kill(household.report().supervisor, signal.SIGKILL)
        try:
            list(iteration)
        except SupervisorDiedError:
            pass
        else:
            raise AssertionError
        del iteration
        assert sum(len(batch["k"]) for batch in made) == 300
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        kept = list(made)
        assert sum(len(batch["k"]) for batch in kept) == 300
        iteration, files = iter(made), []
        next(iteration)
        try:
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            os.close(files.pop())  # room for what travels
        try:
            kept += iteration
        except FileDescriptorLimitError:
            kept = iteration = None
        else:
            raise AssertionError
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert sum(len(batch["k"]) for batch in made) == 300
        del made
        """,
        tmp_path,
        method,
    )


def test_descriptors_do_not_pile_up(tmp_path: Path, method: str) -> None:
    """As many are open after whole, left and killed epochs as before them."""
    run(
        """
        def count():
            current_store().drain()
            current_store().trim()
            return len(os.listdir("/proc/self/fd"))
        assert len(list(loader())) == 8
        before = count()
        for round in range(4):
            made = loader()
            list(made)
            next(iter(made))
            iteration = iter(made)
            mp.active_children()[0].kill()
            try:
                list(iteration)
            except WorkerDiedError:
                pass
            del made, iteration
        wait_until(lambda: count() <= before)
        """,
        tmp_path,
        method,
    )
