"""Variants x paired seeds: which runs are stored, which are missing; each is kept as it ends.

Every variant meets the same seeds. At one seed all variants see the same batches and share the
initial value of every parameter that they have in common, so runs are compared seed by seed.

Missing runs go to worker processes, one CPU thread or one GPU each. Under torchrun they are dealt
out to the ranks, and rank 0 gathers what came of them.
"""

import ast
import functools
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from shared import chapters, data, files, randomness, training
from shared.cli import Plan
from shared.console import UserError
from shared.training import History, Share
from shared.verdict import Interval, Verdict, against

# ---------------------------------------------------------------- what a run is


class Experiment:
    """What a chapter tells the comparison. It travels to worker processes, with its fields."""

    band: float | None = None  # nats by which another machine's means may differ; None: report.BAND
    data_parallel = False  # may several ranks train one model, each on its rows of a batch?

    def build_model(self, config: Any, vocab_size: int, seed: int) -> nn.Module:
        """The freshly initialised model of a variant's config."""
        raise NotImplementedError

    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        """(what is minimised, the cross-entropy that is reported, what after_step is told)."""
        return training.plain_loss(model, idx, targets)

    def after_step(self, model: nn.Module, told: Any) -> None:
        """Called after each step of the optimizer, with the third thing of training_loss."""

    def observe(self, model: nn.Module, idx: torch.Tensor) -> dict:
        """Numbers from inside the model, every settings.observe_every steps; changes nothing."""
        return {}

    def inspect(self, model: nn.Module, corpus: data.Corpus, seed: int) -> dict:
        """What there is to learn from the trained model; goes into results.json."""
        return {}


@dataclass(frozen=True)
class Run:
    """One variant at one seed."""

    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@dataclass
class Result:
    """How a run ended: with a history, or with the reason why it has none."""

    run: Run
    parameters: int = 0
    history: History | None = None
    found: dict = field(default_factory=dict)  # from Experiment.inspect
    error: str | None = None
    stored: bool = False  # read, not trained now


def mean_of(results: list[Result], variant: str, value: Callable[[Result], Any]) -> float:
    """The mean of value(result) over the variant's finished runs; NaN if there are none."""
    values = [value(r) for r in results if r.run.variant == variant and r.history]
    return sum(values) / len(values) if values else math.nan


def losses_of(results: list[Result], variant: str) -> dict[int, float]:
    """Validation loss by seed, of the variant's finished runs."""
    finished = [r for r in results if r.run.variant == variant and r.history]
    return {r.run.seed: r.history.validation_loss for r in finished}


def differences(plan: Plan, results: list[Result]) -> dict[str, tuple[Interval, Verdict]]:
    """By variant, its validation loss minus the baseline's, and what may be said of it."""
    losses = {name: losses_of(results, name) for name in plan.names}
    return against(plan.baseline, losses)


# ---------------------------------------------------------------- runs as files


@functools.cache
def source_hash(script: str) -> str:
    """A hash of the code that a run depends on: the builds, the loop, the batches.

    Comments and line breaks don't count, code and docstrings do.
    """
    ours = [module.__file__ for module in (training, data, randomness)]
    trees = [
        ast.dump(ast.parse(Path(path).read_text(encoding="utf-8")))
        for path in [*chapters.sources(script), *ours]
    ]
    return hashlib.sha256("\n".join(trees).encode("utf-8")).hexdigest()


def source_of(experiment: Experiment) -> str:
    """The hash of the file that defines the experiment and of what it builds on."""
    return source_hash(sys.modules[type(experiment).__module__].__file__)


def sha256_of(value: Any) -> str:
    """The SHA-256 of plain data, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class Store:
    """The runs of a plan under its output folder: one JSON file each, and some trained models."""

    def __init__(self, plan: Plan, experiment: Experiment):
        self.plan = plan
        self.folder = plan.options.output_dir / "runs"
        self.source = source_of(experiment)
        self.experiment = vars(experiment)

    def settings(self, run: Run) -> dict:
        """Everything that the run's numbers depend on, but the code."""
        return {
            "variant": run.variant,
            "seed": run.seed,
            "model": asdict(self.plan.configs[run.variant]),
            "training": asdict(self.plan.training),
            "experiment": self.experiment,
            "corpus": self.plan.corpus.sha256,
            "tokenizer": self.plan.corpus.tokenizer.name,
            "validation_tokens": len(self.plan.corpus.validation),
            "torch": torch.__version__,
        }

    def path(self, run: Run, ending: str = "json") -> Path:
        """Where the run is kept: its name for a person, and a key of its settings."""
        key = sha256_of(self.settings(run))[:12]
        name = re.sub(r"[^a-z0-9]+", "-", run.variant.lower()).strip("-")
        return self.folder / f"{name}_seed-{run.seed}_{key}.{ending}"

    def read(self, run: Run, any_source: bool = False) -> Result | None:
        """The stored run; None if there is none, or (unless any_source) if other code made it.

        UserError for a file that is damaged or is another run's.
        """
        path = self.path(run)
        if not path.exists():
            return None
        record = files.read_json(path, "a stored run")
        try:
            if record.pop("sha256") != sha256_of(record):
                raise ValueError
            if record["settings"] != json.loads(json.dumps(self.settings(run), default=str)):
                raise files.damaged(path, "the run that its name says")
            if record["source"] != self.source and not any_source:
                return None
            history = History(**record["history"])
            losses = [*history.losses, history.validation_loss]
            if len(losses) != self.plan.training.steps + 1 or not math.isfinite(sum(losses)):
                raise ValueError
            return Result(run, record["parameters"], history, record["found"], stored=True)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise files.damaged(path, "a stored run") from None

    def write(self, result: Result) -> None:
        """Keep a finished run."""
        record = {
            "settings": self.settings(result.run),
            "source": self.source,
            "parameters": result.parameters,
            "history": asdict(result.history),
            "found": result.found,
        }
        record = json.loads(json.dumps(record, default=str))
        record["sha256"] = sha256_of(record)
        files.write_json(self.path(result.run), record)

    def keeps_model(self, run: Run) -> bool:
        """Is this run's trained model to be kept?"""
        return self.plan.options.keep or run.seed == self.plan.seeds[0]

    def write_model(self, run: Run, model: nn.Module) -> None:
        """Keep the trained model: its numbers under "model", read by training.load_checkpoint."""
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        path = self.path(run, "pt")
        files.write_bytes(path, training.as_bytes({"of": path.name, "model": state}))

    def unfinished(self, run: Run) -> Path:
        """Where a run in flight keeps its checkpoint."""
        return self.path(run, f"{self.source[:8]}.unfinished.pt")

    def wanted(self) -> list[Run]:
        """Every run of the plan, seed by seed, so that what is interrupted has whole pairs."""
        return [Run(variant, seed) for seed in self.plan.seeds for variant in self.plan.names]

    def forget(self) -> None:
        """Delete what is stored of this plan's runs: they will be trained again."""
        for run in self.wanted():
            for path in (self.path(run), self.path(run, "pt"), self.unfinished(run)):
                path.unlink(missing_ok=True)


# ---------------------------------------------------------------- training what is missing


@dataclass(frozen=True)
class Context:
    """What every run of a comparison has in common; travels to each worker once."""

    experiment: Experiment
    plan: Plan


def stored(plan: Plan, experiment: Experiment, any_source: bool = False) -> list[Result]:
    """The runs of the plan that are on disk."""
    store = Store(plan, experiment)
    found = [store.read(run, any_source) for run in store.wanted()]
    return [result for result in found if result]


def train_missing(
    plan: Plan,
    experiment: Experiment,
    have: list[Result],
    on_report: Callable[..., None] = lambda run, done, loss, ms_per_step: None,
) -> Iterator[Result]:
    """Train the runs of the plan that are not in `have`; yield each as soon as it is there.

    `on_report(run, steps done, loss, ms per step)` hears of those in flight. Under torchrun every
    rank calls this; rank 0 is given every rank's results, the others their own.
    """
    done = {result.run for result in have}
    missing = [run for run in Store(plan, experiment).wanted() if run not in done]
    context = Context(experiment, plan)
    if world().size > 1:
        yield from train_on_ranks(context, missing, on_report)
        return
    n_workers = min(plan.options.workers, len(missing))
    for run, result in run_jobs(train_one, context, missing, n_workers, on_report):
        if isinstance(result, WorkerDied):
            result = Result(run, error=f"its process was killed (exit code {result.exit_code})")
        yield result


def train_one(
    context: Context,
    run: Run,
    report: Callable,
    worker: int = 0,
    share: Share = Share(),
) -> Result:
    """One run, in this process: train it, look inside, keep it."""
    plan = context.plan
    experiment = context.experiment
    store = Store(plan, experiment)
    model = experiment.build_model(plan.configs[run.variant], plan.corpus.vocab_size, run.seed)
    result = Result(run, parameters=sum(p.numel() for p in model.parameters()))  # a tied one once
    settings = replace(plan.training, device=device_of(plan.training.device, worker))
    try:
        result.history = training.train(
            model,
            plan.corpus,
            settings,
            run.seed,
            report=report,
            training_loss=experiment.training_loss,
            after_step=experiment.after_step,
            observe=experiment.observe,
            checkpoint=store.unfinished(run),
            share=share,
        )
        result.found = experiment.inspect(model, plan.corpus, run.seed)
    except training.NonFiniteLoss as error:
        result.error = str(error)
        return result
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        result.error = "there is not enough memory for it"
        return result
    if share.rank == 0:
        keep(store, result, model)
    return result


def keep(store: Store, result: Result, model: nn.Module | None = None) -> None:
    """Write a finished run. A full disk doesn't lose it: the result goes on, with the reason.

    The model is there on the rank that trained it.
    """
    try:
        store.write(result)
        if model is not None and store.keeps_model(result.run):
            store.write_model(result.run, model)
        store.unfinished(result.run).unlink(missing_ok=True)
    except OSError as error:
        result.error = f"it was trained, but can't be kept: {error}"


def is_lack_of_memory(error: Exception) -> bool:
    """torch says it in its own class for a GPU, and in a RuntimeError's words for a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "DefaultCPUAllocator" in str(error)
    )


def device_of(device: str, worker: int) -> str:
    """The device of one worker process: GPUs are dealt out in turn."""
    return f"cuda:{worker % torch.cuda.device_count()}" if device == "cuda" else device


# ---------------------------------------------------------------- torchrun


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started; alone, it is rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine


def world() -> World:
    """What torchrun says in the environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    if not all(os.environ.get(name, "").isdigit() for name in names):
        return World()
    return World(*(int(os.environ[name]) for name in names[:3]))


RANKS_WAIT = timedelta(days=20)  # for the slowest, which may train for days


def join_ranks() -> None:
    """Connect the ranks, once."""
    here = world()
    if here.size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with ranks_needed():
            lasting, *_ = next(dist.rendezvous("env://"))
            dist.init_process_group(
                backend,
                store=fresh_store(lasting, here.rank),
                rank=here.rank,
                world_size=here.size,
                timeout=RANKS_WAIT,
            )


def fresh_store(lasting: dist.Store, rank: int) -> dist.Store:
    """A store for the ranks' addresses, which lives in rank 0 and dies with it.

    torchrun's own, the lasting one, outlives a restart (torch 2.13): the new ranks would find the
    addresses of those that have gone, and wait for them for ever. So it only says where rank 0's
    is, and what it says is believed if somebody answers there.
    """
    host = os.environ["MASTER_ADDR"]
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=RANKS_WAIT)
        lasting.set("port of rank 0", str(store.port))
        return store
    while True:
        port = int(lasting.get("port of rank 0"))
        try:
            socket.create_connection((host, port), timeout=2).close()
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(minutes=1))
        except (OSError, dist.DistError):  # an earlier rank 0's, which has gone
            time.sleep(0.1)
            continue
        store.set_timeout(RANKS_WAIT)
        return store


def leave_ranks() -> None:
    """Part from the other ranks, when all is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


class RankGone(OSError):
    """Another rank has ended, or can't be reached."""


@contextmanager
def ranks_needed() -> Iterator[None]:
    """Within it, what torch says when another rank has gone becomes RankGone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise RankGone(
                "another rank has ended; what was finished is kept, "
                "and the same command goes on from there"
            ) from None
        raise


def on_all_ranks(value: Any) -> list[Any]:
    """Each rank's value, on every rank."""
    values = [value] * world().size
    if len(values) > 1:
        with ranks_needed():
            dist.all_gather_object(values, value)
    return values


def known_to_all(plan: Plan, experiment: Experiment, results: list[Result]) -> list[Result]:
    """The stored runs of every rank, on every rank: their disks may be different ones.

    Rank 0 keeps what only others had.
    """
    known = {r.run: r for theirs in on_all_ranks(results) for r in theirs}
    if world().rank == 0 and not plan.options.report:
        here = {r.run for r in results}
        for run in known.keys() - here:
            keep(Store(plan, experiment), known[run])
    return list(known.values())


def train_on_ranks(
    context: Context, missing: list[Run], on_report: Callable[..., None]
) -> Iterator[Result]:
    """Deal the missing runs out over the ranks; rank 0 gathers all results, and keeps them too.

    The only run of a plan is trained by all ranks together, if the experiment allows it and every
    rank gets as many rows of a batch as the others. The last of several that is missing is not:
    how far an earlier command came must not be seen in the numbers.
    """
    here = world()
    torch.set_num_threads(1)
    together = context.plan.n_runs == 1 == len(missing) and context.experiment.data_parallel
    if together and context.plan.training.batch_size % here.size == 0:
        mine = missing
        share = Share(here.rank, here.size)
    else:
        mine = missing[here.rank :: here.size]
        share = Share()
    results = []
    for run in mine:
        report = functools.partial(on_report, run)
        with ranks_needed():
            results.append(train_one(context, run, report, here.local_rank, share))
        if here.rank == 0:
            yield results[-1]
    gathered = on_all_ranks(results)
    if here.rank > 0 or share.world > 1:
        return
    store = Store(context.plan, context.experiment)
    for result in (r for theirs in gathered[1:] for r in theirs):
        if result.history and not store.path(result.run).exists():  # another machine's disk
            keep(store, result)
        yield result


# ---------------------------------------------------------------- worker processes


class ParentGone(Exception):
    """Raised in a worker that has nobody left to report to."""


class WorkerDied:
    """What a job "returns" when its process was killed, for want of memory say."""

    def __init__(self, exit_code: int | None):
        self.exit_code = exit_code


def run_jobs(
    function: Callable[[Any, Any, Callable, int], Any],
    context: Any,
    jobs: list[Any],
    n_workers: int,
    on_report: Callable[..., None],
) -> Iterator[tuple[Any, Any]]:
    """Yield (job, what function(context, job, report, worker) returned), in the order they end.

    Whatever function passes to report(...) arrives at on_report(job, ...) here. An exception
    inside function is a bug: it ends the loop with a RuntimeError that holds the worker's
    traceback. When the loop is left, for whatever reason, the workers are stopped.

    Processes, not threads: a model this small leaves a second OpenMP thread with nothing to do,
    while a second process trains a second model. One thread also makes the numbers independent of
    how many workers there are.
    """
    waiting = list(jobs)
    busy: dict[Connection, tuple[Any, int, Any]] = {}  # connection -> (process, number, its job)
    try:
        while waiting or busy:
            free = sorted(set(range(n_workers)) - {number for _, number, _ in busy.values()})
            # All processes start before the first is talked to: each takes seconds to import torch.
            fresh = []
            for number in free[: len(waiting)]:
                process, connection = start_worker(function, number)
                busy[connection] = (process, number, waiting.pop(0))
                fresh.append(connection)
            for connection in fresh:
                send(connection, context)
                send(connection, busy[connection][2])
            for connection in wait(list(busy)):
                process, number, job = busy[connection]
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    kind = "died"
                    content = WorkerDied(process.exitcode)
                if kind == "report":
                    on_report(job, *content)
                    continue
                if kind == "bug":
                    raise RuntimeError(f"a worker process failed at {job}:\n{content}")
                if kind == "error":
                    raise content
                if kind == "done" and waiting:
                    busy[connection] = (process, number, waiting.pop(0))
                    send(connection, busy[connection][2])
                else:
                    del busy[connection]
                    connection.close()  # tells the worker to go
                    process.join()
                yield job, content
    finally:
        for connection, (process, _, _) in busy.items():
            process.kill()  # what it had in hand is in its checkpoint
            process.join()
            connection.close()


def start_worker(function: Callable, number: int) -> tuple[Any, Connection]:
    """Start a process that serves `function`; returns it and this end of the connection to it."""
    spawn = multiprocessing.get_context("spawn")  # the only way that is the same on every system
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(there, function, number), daemon=True)
    with ctrl_c_waits():
        process.start()
    there.close()
    return process, here


def send(connection: Connection, content: Any) -> None:
    """Send to a worker. If its process has died, the next recv() from it says so."""
    with suppress(OSError):
        connection.send(content)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """A process started within is deaf to Ctrl-C from its first instruction: the parent decides.

    What arrives at the parent meanwhile is heard at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = []
    before = signal.signal(signal.SIGINT, lambda *_: arrived.append("Ctrl-C"))
    try:
        with ctrl_c_blocked():
            yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Ctrl-C is blocked for this thread, and for the processes that it starts; not on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(connection: Connection, function: Callable, number: int) -> None:
    """A worker's life: the context, then jobs one by one, until the parent closes or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)

    def report(*content: Any) -> None:
        try:
            connection.send(("report", content))
        except OSError:
            raise ParentGone from None

    try:
        context = connection.recv()
        while True:
            job = connection.recv()
            try:
                answer = ("done", function(context, job, report, number))
            except ParentGone:
                raise
            except UserError as error:
                answer = ("error", error)
            except Exception:
                answer = ("bug", traceback.format_exc())
            connection.send(answer)
    except (EOFError, OSError, ParentGone):
        pass  # the parent has gone, or has no more to do
