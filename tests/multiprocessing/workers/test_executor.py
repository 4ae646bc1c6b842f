"""`Executor`: the library's interface, deaths that are named; and arrays that tasks of one call share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytestmark = pytest.mark.matrix(cover=(), size=1)


def test_calls_and_results(tmp_path: Path, method: str) -> None:
    """Arrays go and come as through a queue, functions of ``__main__`` by value, in order."""
    run_program(
        """
        shared, private = nbp.ones(10), np.ones(100_000)

        def total(x, factor):
            return float(x.sum() * factor)

        def fill(value):
            shared[...] = value
            return np.full(100_000, value)

        with mp.Executor(2, ctx) as executor:
            assert list(executor.map(total, [private] * 3, range(3))) == [0.0, 1e5, 2e5]
            found = executor.submit(fill, 7.0).result(30)
            assert shared[0] == 7 and found[-1] == 7
            assert nbp.is_shared(found) and found.flags.writeable
            assert executor.submit(lambda: 5).result(30) == 5
            assert not nbp.is_shared(private) and private[0] == 1
        del found
        """,
        tmp_path,
        method,
    )


def test_a_call_of_a_callback_goes_to_its_own_executor(tmp_path: Path, method: str) -> None:
    """A callback runs in the thread of one executor; what it submits to another is calculated there."""
    run_program(
        """
        from concurrent.futures import Future

        ended = Future()

        def double(x):
            return 2 * x, os.getpid()

        with mp.Executor(1, ctx) as a, mp.Executor(1, ctx, **OPTIONS) as b:
            def hand_on(first):
                b.submit(double, first.result()[0]).add_done_callback(
                    lambda second: ended.set_result((first.result(), second.result()))
                )

            a.submit(double, 1).add_done_callback(hand_on)
            (two, one_pid), (four, other_pid) = ended.result(30)
            assert (two, four) == (2, 4) and one_pid != other_pid
        """.replace("OPTIONS", "{}" if method == "fork" else '{"max_tasks_per_child": 1}'),
        tmp_path,
        method,
    )


def test_what_cannot_be_sent_costs_its_call(tmp_path: Path, method: str) -> None:
    """Also what raises while another call's result is awaited, and an interrupt while it is pickled."""
    run_program(
        """
        import threading

        changing, stop = {n: range(n) for n in range(20_000)}, []

        def change():
            while not stop:
                changing[len(changing)] = range(1)
                time.sleep(0.0005)

        class Interrupts:
            def __reduce__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
                return list, ()

        with mp.Executor(1, ctx) as executor:
            first, second = executor.submit(time.sleep, 0.3), executor.submit(abs, -2)
            changer = threading.Thread(target=change)
            changer.start()
            third, fourth = executor.submit(len, changing), executor.submit(abs, -4)
            assert (first.result(30), second.result(30), fourth.result(30)) == (None, 2, 4)
            assert third.exception(30) is None or "changed size" in str(third.exception())
            stop.append(True)
            changer.join()
            try:
                executor.submit(len, Interrupts()).result(30)
            except KeyboardInterrupt:
                pass
            assert executor.submit(abs, -5).result(30) == 5
        """,
        tmp_path,
        method,
    )


def test_a_callback_cannot_wait_for_the_others(tmp_path: Path, method: str) -> None:
    """`shutdown` in a callback raises, as the library's does, where calls are left."""
    run_program(
        """
        raised = []

        def end(_):
            try:
                executor.shutdown()
            except RuntimeError as error:
                raised.append(str(error))

        executor = mp.Executor(1, ctx)
        first, second = executor.submit(time.sleep, 0.3), executor.submit(time.sleep, 0.3)
        first.add_done_callback(end)
        second.result(30)
        executor.shutdown()
        assert "wait=False" in raised[0]
        """,
        tmp_path,
        method,
    )


def test_a_child_that_is_forked_while_a_call_is_sent(tmp_path: Path) -> None:
    """It ends: it does not wait for a lock of a thread that it has not."""
    run_program(
        """
        large = [[n] for n in range(1_000_000)]  # the thread that has the results sends it: 0.1 s
        with mp.Executor(1, ctx) as executor:
            calls = [executor.submit(len, large) for _ in range(10)]
            while not all(call.done() for call in calls):
                child = ctx.Process(target=executor.shutdown)
                child.start()
                child.join(10)
                assert child.exitcode == 0, child.exitcode
        """,
        tmp_path,
        "fork",
    )


@pytest.mark.slow
def test_exceptions_of_calls(tmp_path: Path, method: str) -> None:
    """A call's exception keeps its type, with the worker's traceback; what cannot travel fails alone."""
    run_program(
        """
        import threading

        class Special(ValueError):
            pass

        def fail():
            raise Special("here")

        with mp.Executor(2, ctx) as executor:
            for call, kind in [
                ((fail,), Special),
                ((print, threading.Lock()), UnpicklableError),
                ((threading.Lock,), Exception),
            ]:
                try:
                    executor.submit(*call).result(30)
                except kind as error:
                    assert not isinstance(error, WorkerDiedError), error
                    assert kind is not Special or "raise Special" in str(error.__cause__)
                else:
                    raise AssertionError(call)
            assert executor.submit(abs, -1).result(30) == 1
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_dead_worker(tmp_path: Path, method: str) -> None:
    """The call that it ran fails with an error that names it; the others, and the next ones, go on."""
    run_program(
        """
        def end(gate):
            while not os.path.exists(gate):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        with mp.Executor(2, ctx) as executor:
            assert executor.submit(abs, -1).result(30) == 1
            lost, *others = [executor.submit(end, "gate"), *(executor.submit(pow, k, 2) for k in range(9))]
            assert not lost.done() and lost.running() and not lost.cancel()
            open("gate", "w").close()
            try:
                lost.result(30)
            except WorkerDiedError as error:
                assert error.signal_name == "SIGKILL" and f"worker {error.pid} of the executor " in str(error)
                assert error.task == "it ran a call", error.task
            else:
                raise AssertionError
            assert [other.result(30) for other in others] == [k * k for k in range(9)]
            assert executor.submit(abs, -1).result(30) == 1
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_states_of_futures(tmp_path: Path, method: str) -> None:
    """What no worker can have yet is cancelled, also by `shutdown`; arguments have any name."""
    run_program(
        """
        from concurrent import futures

        executor = mp.Executor(1, ctx)
        assert executor.submit(dict, self=1, fn=2).result(30) == {"self": 1, "fn": 2}
        running = executor.submit(time.sleep, 0.5)
        waiting = [executor.submit(pow, k, 2) for k in range(6)]
        assert running.running() and waiting[-1].cancel() and waiting[-1].cancelled()
        executor.shutdown(wait=False, cancel_futures=True)
        done, not_done = futures.wait([running, *waiting], 30)
        assert not not_done and running.result() is None
        assert waiting[0].result() == 0, "it was in the pool"
        assert all(future.cancelled() for future in waiting[1:])
        try:
            executor.submit(abs, 1)
        except RuntimeError as error:
            assert "after shutdown" in str(error)
        else:
            raise AssertionError
        for wrong in ({"max_workers": 0}, {"max_tasks_per_child": 0}, {"initializer": 1}):
            try:
                mp.Executor(**wrong)
            except (ValueError, TypeError) as error:
                assert next(iter(wrong)) in str(error)
            else:
                raise AssertionError(wrong)
        with mp.Executor(2, ctx) as executor:
            assert list(executor.map(pow, range(7), [2] * 9, chunksize=3)) == [k * k for k in range(7)]
            try:
                list(executor.map(time.sleep, [0, 1], timeout=0.2))
            except futures.TimeoutError:
                pass
            else:
                raise AssertionError
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_one_that_nothing_holds_any_more(tmp_path: Path, method: str) -> None:
    """Its calls end, also when the program ends before, then its workers; a forked child has its own."""
    printed = run_program(
        """
        import warnings
        from nbparallel.testing.waiting import wait_until

        def late():
            time.sleep(0.5)
            print("late", flush=True)

        assert list(mp.Executor(1, ctx).map(abs, range(-3, 3))) == [3, 2, 1, 0, 1, 2]
        wait_until(lambda: not mp.active_children())
        executor = mp.Executor(1, ctx)
        executor.submit(late)
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: threads and a fork
        child = os.fork()
        if child == 0:
            found = executor.submit(pow, 2, 3).result(30)
            executor.shutdown()
            del executor  # and with it the names of its locks
            os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
        mp.Executor(1, ctx).submit(late)
        """,
        tmp_path,
        method,
    )
    assert printed == "late\nlate\n"


@pytest.mark.slow
def test_initializer_and_replaced_workers(tmp_path: Path) -> None:
    """Locks travel to workers in `initargs`, and a worker is replaced after as many calls as asked."""
    run_program(
        """
        def begin(lock, x):
            globals().update(lock=lock, x=x)

        def look():
            with lock:
                return os.getpid(), float(x[0])

        context = mp.get_context("forkserver")
        with mp.Executor(
            1, context, initializer=begin, initargs=(context.Lock(), nbp.ones(3)), max_tasks_per_child=2
        ) as executor:
            found = [executor.submit(look).result(30) for _ in range(4)]
        assert [x for _, x in found] == [1.0] * 4
        assert len({pid for pid, _ in found}) == 2, found
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_a_context_of_the_library(tmp_path: Path) -> None:
    """It stands for ours of the same start method; ``fork``, which cannot replace workers, gives way."""
    run_program(
        """
        import multiprocessing
        with mp.Executor(1, multiprocessing.get_context("fork")) as executor:
            assert executor.submit(lambda: nbp.is_shared(np.ones(3))).result(30) is False
        mp.set_start_method("fork", force=True)
        with mp.Executor(1, max_tasks_per_child=1) as executor:
            assert executor.submit(abs, -2).result(30) == 2
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_one_copy_for_the_tasks_of_a_call(tmp_path: Path, method: str) -> None:
    """What several tasks of a map hold is copied once, in whatever way; each task writes to its own."""
    run_program(
        """
        import threading
        from functools import partial
        from nbparallel.testing.waiting import wait_until

        x, gate, sent = np.ones(1 << 20), nbp.zeros(1), threading.Event()

        class Third:
            def __reduce__(self):  # runs when the third task is pickled, behind its array
                sent.set()
                return int, ()

        def work(x, mark, i):
            while not gate[0]:
                time.sleep(0.001)
            x[i] += 1
            return float(x.sum()) - x.size, nbp.is_shared(x), x.flags.writeable

        def enclosing(x):
            return lambda mark, i: work(x, mark, i)

        def by_name(mark, i):
            while not gate[0]:
                time.sleep(0.001)
            return float(x.sum()) - x.size + 1, nbp.is_shared(x), x.flags.writeable

        def copies(*phases):
            rows = nbp.segments()
            return {row.segment for row in rows if row.own and row.phase in phases and row.nbytes >= x.nbytes}

        def check(start):
            gate[0] = 0
            sent.clear()
            before = copies("live", "released")  # workers say later that they have dropped one
            finish = start()
            assert sent.wait(30)
            made = copies("live", "released") - before  # released as soon as the last task is sent
            assert len(made) == 1, made
            gate[0] = 1
            assert list(finish()) == [(1.0, False, True)] * 6
            del finish, start
            wait_until(lambda: not copies("live"))
            assert x.sum() == x.size and not nbp.is_shared(x)

        marks = [0, 0, Third(), 0, 0, 0]
        short = list(zip(marks, range(6)))
        with ctx.Pool(2) as pool:
            long = [(x, *rest) for rest in short]
            for function, tasks in [
                (work, long), (partial(work, x), short), (enclosing(x), short), (by_name, short)
            ]:
                check(lambda: pool.starmap_async(function, tasks, 1).get)
            del long
        with mp.Executor(2, ctx) as executor:
            check(lambda: partial(iter, executor.map(work, [x] * 6, marks, range(6))))
            check(lambda: partial(iter, executor.map(partial(work, x), marks, range(6))))
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_what_one_task_of_a_call_holds(tmp_path: Path) -> None:
    """An array of one task arrives shared, as through a queue; one that changes between two tasks is new."""
    run_program(
        """
        def look(x):
            return nbp.is_shared(x), float(x[0]), x

        def changing():
            x = np.zeros(40_000)
            for _ in range(4):
                x += 1
                yield x

        with ctx.Pool(2) as pool, mp.Executor(2, ctx) as executor:
            values = [0.0, 1.0, 2.0, 3.0]
            arrays = [np.full(40_000, value) for value in values]
            for found in (
                pool.map(look, arrays, 1),
                list(executor.map(look, arrays)),
                pool.map(look, np.stack(arrays), 1),
            ):
                assert [part[:2] for part in found] == [(True, value) for value in values]
                assert all(nbp.is_shared(part[2]) for part in found)
            assert [part[1] for part in pool.imap(look, changing())] == [1.0, 2.0, 3.0, 4.0]
            found = pool.imap(look, changing(), 2)
            assert [part[1] for part in found] == [2.0, 2.0, 4.0, 4.0], "as from the library"
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_one_that_a_child_process_leaves_open(tmp_path: Path, method: str) -> None:
    """The process ends, though the library's would wait for workers that no thread tells to end."""
    run_program(
        """
        def use(end):
            global kept
            kept = mp.Executor(1, ctx)
            end.send(kept.submit(abs, -1).result(30))

        here, there = ctx.Pipe()
        process = ctx.Process(target=use, args=(there,))
        process.start()
        assert here.recv() == 1
        process.join(20)
        assert process.exitcode == 0
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_replaced_workers_after_shutdown(way: str, tmp_path: Path) -> None:
    """Calls that were sent before `shutdown(wait=False)` end, though each worker does one only."""
    run_program(
        """
        executor = mp.Executor(1, ctx, max_tasks_per_child=1)
        futures = [executor.submit(pow, k, 2) for k in range(4)]
        executor.shutdown(wait=False)
        assert [future.result(30) for future in futures] == [0, 1, 4, 9]
        """,
        tmp_path,
        way,
    )


@pytest.mark.slow
def test_errors_name_the_initializer_and_the_result(tmp_path: Path) -> None:
    """Not the exit code of a worker that has told nobody why, nor a class of the library."""
    run_program(
        """
        import logging
        logging.disable()  # the library logs the traceback in the worker

        def fails(_):
            raise ValueError("no data of that day")

        def generator():
            yield 1

        executor = mp.Executor(2, ctx, initializer=fails, initargs=(1,))
        try:
            executor.submit(pow, 1, 2).result(30)
        except WorkerDiedError as error:
            assert "its initializer raised ValueError: no data of that day" in str(error), error
        else:
            raise AssertionError
        executor.shutdown()
        with mp.Executor(1, ctx) as executor, ctx.Pool(1) as pool:
            for call in (lambda: executor.submit(generator).result(30), lambda: pool.apply(generator)):
                try:
                    call()
                except Exception as error:
                    assert "the result of a task cannot be sent" in str(error), error
                    assert "it is a generator" in str(error) and "_ResultItem" not in str(error), error
                else:
                    raise AssertionError
        """,
        tmp_path,
        "fork",
    )


@pytest.mark.slow
def test_lines_and_threads_of_workers(tmp_path: Path, method: str) -> None:
    """A pool's and an executor's workers write whole lines, and share the CPUs as ranks do."""
    printed = run_program(
        """
        import threadpoolctl

        def look(n):
            time.sleep(0.1)
            for _ in range(2000):
                print(f"{n}" * 99)
            info = threadpoolctl.threadpool_info()
            return {one["num_threads"] for one in info} | {int(os.environ["OMP_NUM_THREADS"])}

        share = max(1, len(os.sched_getaffinity(0)) // 2)
        before = {one["num_threads"] for one in threadpoolctl.threadpool_info()}
        os.environ.pop("OMP_NUM_THREADS", None)
        with ctx.Pool(2) as pool:
            assert pool.map(look, [1, 2], 1) == [{share}] * 2
            pool.close()
            pool.join()
        with mp.Executor(2, ctx) as executor:
            assert list(executor.map(look, [3, 4])) == [{share}] * 2
        if ctx.get_start_method() != "forkserver":  # whose environment is that of its start
            os.environ["OMP_NUM_THREADS"] = "3"
            with ctx.Pool(2) as pool:
                assert all(3 in found for found in pool.map(look, [5, 6], 1)), "what the user has set stays"
        assert before == {one["num_threads"] for one in threadpoolctl.threadpool_info()}
        """,
        tmp_path,
        method,
    )
    lines = printed.splitlines()
    assert {*lines} <= {str(n) * 99 for n in range(1, 7)}
    assert len(lines) >= 4 * 2000


@pytest.mark.parametrize("how", ["terminate_workers", "kill_workers"])
def test_workers_are_ended_now(tmp_path: Path, method: str, how: str) -> None:
    """As since CPython 3.14: calls under way and those that wait end, and no worker remains."""
    run_program(
        f"""
        import time
        from concurrent.futures import CancelledError

        executor = mp.Executor(1, ctx)
        assert executor.submit(int, 7).result(30) == 7
        calls = [executor.submit(time.sleep, 60) for _ in range(4)]
        executor.{how}()
        for call in calls:
            try:
                call.result(30)
            except CancelledError:
                continue
            raise AssertionError("it went on")
        try:
            executor.submit(int)
        except RuntimeError as error:
            assert "after shutdown" in str(error)
        until = time.monotonic() + 30
        while mp.active_children() and time.monotonic() < until:
            time.sleep(0.01)
        assert not mp.active_children()
        executor.{how}()
        """,
        tmp_path,
        method,
    )
