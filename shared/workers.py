"""Run jobs in worker processes, one CPU thread each, and hand back what they return as they finish.

Processes, not threads: a model this small leaves a second OpenMP thread with nothing to do, while a second
process trains a second model. One thread also makes the numbers independent of how many workers there are.
"""

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from shared.kernels import fastest_float32


class ParentGone(Exception):
    """Raised in a worker that has nobody left to report to."""


class WorkerDied:
    """What a job "returns" when its process was killed, for want of memory say."""

    def __init__(self, exit_code: int | None):
        self.exit_code = exit_code


def run_jobs(
    function: Callable[[Any, Any, Callable], Any],
    context: Any,
    jobs: list[Any],
    n_workers: int,
    on_report: Callable[..., None],
) -> Iterator[tuple[Any, Any]]:
    """Yield (job, what function(context, job, report) returned) for every job, in the order in which they end.

    Whatever function passes to report(...) arrives at on_report(job, ...) here. An exception inside function is
    a bug: it ends the loop with a RuntimeError that holds the worker's traceback. When the loop is left, for
    whatever reason, the workers are stopped.
    """
    waiting = list(jobs)
    busy: dict[Connection, tuple[Any, Any]] = {}  # connection -> (process, its job)
    try:
        while waiting or busy:
            # All processes start before the first is talked to: each takes a second to import torch.
            fresh = [start_worker(function) for _ in range(min(len(waiting), n_workers - len(busy)))]
            for process, connection in fresh:
                busy[connection] = (process, waiting.pop(0))
            for _, connection in fresh:
                send(connection, context)
                send(connection, busy[connection][1])
            for connection in wait(list(busy)):
                process, job = busy[connection]
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    kind, content = "died", WorkerDied(process.exitcode)
                if kind == "report":
                    on_report(job, *content)
                    continue
                if kind == "bug":
                    raise RuntimeError(f"a worker process failed at {job}:\n{content}")
                if kind == "done" and waiting:
                    busy[connection] = (process, waiting.pop(0))
                    send(connection, busy[connection][1])
                else:
                    del busy[connection]
                    connection.close()  # tells the worker to go
                    process.join()
                yield job, content
    finally:
        for connection, (process, _) in busy.items():
            process.terminate()
            process.join()
            connection.close()


def start_worker(function: Callable) -> tuple[Any, Connection]:
    """Start a process that serves `function`; returns it and this end of the connection to it."""
    spawn = multiprocessing.get_context("spawn")  # the only way that is the same on every system
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(there, function), daemon=True)
    with ctrl_c_ignored():
        process.start()
    there.close()
    return process, here


def send(connection: Connection, content: Any) -> None:
    """Send to a worker. If its process has died, the next recv() from it says so, and that is where it is handled."""
    with suppress(OSError):
        connection.send(content)


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """A process started within ignores Ctrl-C from its first instruction: the parent alone decides what it means."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve(connection: Connection, function: Callable) -> None:
    """A worker's life: the context, then jobs one by one, until the parent closes the connection or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)

    def report(*content: Any) -> None:
        try:
            connection.send(("report", content))
        except OSError:
            raise ParentGone from None

    try:
        context = connection.recv()
        with fastest_float32():
            while True:
                job = connection.recv()
                try:
                    answer = ("done", function(context, job, report))
                except ParentGone:
                    raise
                except Exception:
                    answer = ("bug", traceback.format_exc())
                connection.send(answer)
    except (EOFError, OSError, ParentGone):
        pass  # the parent has gone, or has no more to do
