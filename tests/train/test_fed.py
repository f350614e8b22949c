"""A training that is fed while it runs makes the weights of one that has all shards, whichever side is killed. No more
shards lie on the disk than there is room for, and the number of shards made is the minimum for that room.
"""

import heapq
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from infra.plan.memory import count_shards_ahead
from pipeline.artifacts.features import ShardRequest, feature_spec, fetch, read_shard_request, write_shard_request
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.positions import Horizons
from pipeline.features.shards import Manifest, ShardRecord, shard_name
from pipeline.features.store import Store
from pipeline.lm.states import Needs
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import NO_TASK_YET
from pipeline.running.state import features_state
from pipeline.running.workers import WorkerPool
from preprocess.dump.feeder import feed
from tests.kit import (
    Shown,
    checksums,
    command_environment,
    dump_here,
    flip,
    holding_files,
    run_warm,
    wait_until,
    without_ray,
)
from tests.train.runs import kill_training, run_training, steps_so_far, stopped_here, train_here
from tests.warm import PATIENCE, Forked
from train.input.data import Batches
from train.input.features import FedStore
from train.input.order import Order, Reads

WEIGHTS = "drafts/jakiro/model.safetensors"
BOUND = 290_000  # bytes: the three shards that the steps read ahead want, of five that take 375,000
FED = ("features.keep=window", f"features.disk_bytes={BOUND}", "train.window=1")


def prepared(dumped, output: Path) -> Recipe:
    """A dump that leaves training's states to be made when they are read."""
    recipe = load_recipe(dumped[0], [f"output={output}", *FED])
    manifest = dump_here(recipe)
    assert manifest.shards_of("train") == [] and manifest.missing_rows("train") == 40 and features_state(recipe)[0]
    return recipe


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Record the bytes of train shards and their texts at each check, including those that are being written."""
    sizes, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            size = 0
            for path in folder.glob("*-train-*"):
                with suppress(FileNotFoundError):
                    size += path.stat().st_size
            sizes.append(size)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(look)
        try:
            yield sizes
        finally:
            done.set()


def left(recipe: Recipe) -> list[str]:
    return [path.name for path in [*recipe.paths.features.glob("*-train-*"), *recipe.paths.run.glob("wanted*")]]


@pytest.fixture(scope="module")
def stored(dumped, tmp_path_factory) -> str:
    """The SHA-256 of the weights that one rank makes of a dump that kept all, in windows of one shard."""
    output = tmp_path_factory.mktemp("stored")
    train_here(dumped, output, "train.window=1")
    return sha256(output / WEIGHTS)


@pytest.mark.long
def test_a_run_feeds_its_training_within_the_bound_and_leaves_nothing(dumped, stored, tmp_path, on_cluster):
    recipe = load_recipe(dumped[0], [f"output={tmp_path / 'fed'}", *FED])
    sets = override_arguments([f"output={tmp_path / 'fed'}", *FED])
    command = [sys.executable, "-m", "pipeline", "run", str(dumped[0]), "--until", "train", *sets]
    with watched(recipe.paths.features) as sizes:
        done = run_warm(command, RAY_ADDRESS=on_cluster.address)
    assert done.returncode == 0, done.stderr
    assert sha256(tmp_path / "fed" / WEIGHTS) == stored
    everything = Manifest.load(dumped[1]).total("train", "bytes")
    print(f"train shards took {max(sizes):,} bytes at most; all of them have {everything:,}")
    assert 0 < max(sizes) <= BOUND < everything and left(recipe) == []
    made = r"feed: \d+ train shards made, none left; [\d,]+ tokens/s, waiting (\d+)% for room"
    (share,) = re.findall(made, done.stdout)
    assert 0 <= int(share) <= 100
    again = run_warm(command)
    assert "preprocess: done already" in again.stdout and "train: done already" in again.stdout


@contextmanager
def feeder(dumped, recipe: Recipe, error: Path) -> Iterator[Forked]:
    """A feeder's process, which writes to `error` and is killed after the block."""
    sets = override_arguments([f"output={recipe.output}", *FED])
    process = Forked([sys.executable, "preprocess/feed.py", str(dumped[0]), *sets], command_environment(), error)
    try:
        yield process
    finally:
        if process.poll() is None:
            killed(process)


def killed(process: Forked) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not holding_files(os.getpgid, process.pid))


@pytest.mark.long
def test_either_side_is_killed_and_two_ranks_make_the_weights_of_a_stored_run(dumped, by_two, tmp_path):
    sets, output, error = ["train.micro_batch=2"], tmp_path / "fed", tmp_path / "stderr"
    recipe = prepared(dumped, output)
    with watched(recipe.paths.features) as sizes, ThreadPoolExecutor(1) as thread:
        with feeder(dumped, recipe, error) as first:
            kill_training(
                dumped, output, lambda: steps_so_far(output) >= 7 or first.poll() is not None, *sets, *FED, ranks=2
            )
            assert first.poll() is None, error.read_text()
            training = thread.submit(run_training, dumped, output, *sets, *FED, ranks=2)
            wait_until(lambda: training.done() or steps_so_far(output) >= 12 or first.poll() is not None)
            assert first.poll() is None, error.read_text()
        with feeder(dumped, recipe, error) as second:
            wait_until(lambda: training.done() or second.poll() not in (None, 0))
            assert second.poll() in (None, 0), error.read_text()
            assert training.result().returncode == 0, training.result().stderr
            assert second.wait(PATIENCE) == 0, error.read_text()
    assert 0 < max(sizes) <= BOUND and left(recipe) == []
    assert sha256(output / WEIGHTS) == by_two


@contextmanager
def fed(recipe: Recipe) -> Iterator[Future[list[str]]]:
    """Return the last lines of the feeder, which serves trainings in this process or others. They would wait for ever
    for a feeder that failed, so its failure interrupts the test with the feeder's error.
    """
    test = threading.get_ident()

    def serve() -> list[str]:
        try:
            return feed(recipe)
        except BaseException:
            signal.pthread_kill(test, signal.SIGINT)
            raise

    with watched(recipe.paths.features) as sizes, ThreadPoolExecutor(1) as thread, without_ray():
        feeding = thread.submit(serve)
        try:
            yield feeding
            assert "none left" in feeding.result(PATIENCE)[0]
        except BaseException:
            write_shard_request(recipe, ShardRequest([]))
            feeding.result(PATIENCE)
            raise
    assert 0 < max(sizes) <= BOUND and left(recipe) == []


@pytest.mark.long
def test_under_zero_3_a_training_is_fed_alike(dumped, tmp_path):
    sets, output = ["train.zero_stage=3", "train.window=1"], tmp_path / "fed"
    done = run_training(dumped, tmp_path / "stored", *sets)
    assert done.returncode == 0, done.stderr
    with fed(prepared(dumped, output)):
        done = run_training(dumped, output, *sets, *FED)
        assert done.returncode == 0, done.stderr
    assert sha256(output / WEIGHTS) == sha256(tmp_path / "stored" / WEIGHTS)


def test_until_its_patience_ends_a_training_is_fed_alike(dumped, tmp_path):
    """The fed training keeps the same weights as the stored one; its feeder ends with it."""
    sets = ["train.patience=2", "train.keep=best", "train.validate_every=2", "train.learning_rate=0.02"]
    sets, output = [*sets, "train.window=1"], tmp_path / "fed"
    train_here(dumped, tmp_path / "stored", *sets)
    with fed(prepared(dumped, output)):
        train_here(dumped, output, *sets, *FED)
    assert sha256(output / WEIGHTS) == sha256(tmp_path / "stored" / WEIGHTS)
    assert steps_so_far(output) == steps_so_far(tmp_path / "stored") < 20


def test_drafts_that_train_together_have_the_weights_that_each_has_alone(dumped, stored, tmp_path):
    """Both drafts read one pass over the states, also if one of them was stopped before."""
    output = tmp_path / "fed"
    train_here(dumped, tmp_path / "alone", "train.window=1", draft="eagle")
    recipe = prepared(dumped, output)
    with fed(recipe):
        stopped_here(dumped, output, *FED, saves=3)
        write_shard_request(recipe, ShardRequest([]))
    with fed(recipe) as feeding:
        train_here(dumped, output, *FED, "train.together=true", draft=None)
    made = int(feeding.result()[0].split()[0])
    assert sha256(output / WEIGHTS) == stored
    eagle = "drafts/eagle/model.safetensors"
    assert sha256(output / eagle) == sha256(tmp_path / "alone" / eagle)
    reads = Order(FedStore(recipe, Manifest.load(recipe.paths.features).spec), recipe.train, recipe.seed).reads
    assert 5 < made <= reads.count_made_shards(3, 3) < reads.count_made_shards(3, 3, trainings=2)


@pytest.mark.long
def test_drafts_that_two_ranks_train_together_have_the_weights_that_each_has_alone(dumped, by_two, tmp_path):
    sets, alone, both = ["train.micro_batch=2", "train.window=1"], tmp_path / "alone", tmp_path / "both"
    for output, more, draft in ((alone, [], "eagle"), (both, ["train.together=true"], None)):
        done = run_training(dumped, output, *sets, *more, ranks=2, draft=draft)
        assert done.returncode == 0, done.stderr
    eagle = "drafts/eagle/model.safetensors"
    assert sha256(both / WEIGHTS) == by_two and sha256(both / eagle) == sha256(alone / eagle)


@pytest.mark.parametrize("place", [pytest.param("store", marks=pytest.mark.long), "folder"])
def test_a_nodes_ranks_read_copies_of_shards_that_come_and_go(
    dumped, by_two, stored, tmp_path, bucket, monkeypatch, place
):
    """Two ranks in an object store, one in the run's folder. A feeder was stopped there and ranks were killed here
    before.
    """
    output, local, url = tmp_path / "fed", tmp_path / "local", bucket.replace("/run?", "/fed?")
    sets = [*FED, f"train.shards={local}", *([f'features.store="{url}"', "train.micro_batch=2"] * (place == "store"))]
    recipe = load_recipe(dumped[0], [f"output={output}", *sets])
    shard_store = Store(url if place == "store" else recipe.paths.features.as_uri())
    first, counts, put = shard_name("train", 0), [0], Store.put

    def of_train() -> int:
        return sum(size for name, size in shard_store.sizes().items() if "-train-" in name)

    def put_and_look(store: Store, path: Path) -> None:
        put(store, path)
        counts.append(of_train())

    dump_here(recipe)
    feed_first(recipe, monkeypatch)
    assert of_train() > 0
    for name in (first, shard_name("train", 9)):  # damaged; one that no manifest names
        (tmp_path / name).write_bytes(b"half")
        shard_store.put(tmp_path / name)
    local.mkdir()
    for name in (first, shard_name("train", 9), f".{first}.1.tmp"):
        (local / name).write_bytes(b"half")
    monkeypatch.setattr(Store, "put", put_and_look)
    with watched(local) as copies, fed(recipe):
        if place == "store":
            done = run_training(dumped, output, *sets, ranks=2)
            assert done.returncode == 0, done.stderr
        else:
            train_here(dumped, output, *sets)
    assert sha256(output / WEIGHTS) == (by_two if place == "store" else stored)
    assert max(counts) <= BOUND and 0 < max(copies) <= BOUND
    assert max(counts) > 0 or place == "folder"  # nothing is put there
    assert of_train() == 0 and list(local.glob("*-train-*")) == []
    assert {path.name for path in local.glob("*.arrow")} < checksums(dumped[1]).keys()


def feed_first(recipe: Recipe, monkeypatch) -> None:
    """A feeder that is stopped when it has made the first shard."""
    wants = iter([ShardRequest([0], 1, 1)])
    with pytest.raises(RuntimeError, match="StopIteration"), monkeypatch.context() as patched, without_ray():
        patched.setattr("preprocess.dump.feeder.read_shard_request", lambda _: next(wants))
        feed(recipe)


def test_a_shard_that_is_damaged_in_the_store_is_told_at_once(dumped, tmp_path, monkeypatch):
    store_folder, url = tmp_path / "there", f"file://{tmp_path}/there"
    sets = [f"output={tmp_path / 'run'}", *FED, f"features.store={url}", f"train.shards={tmp_path / 'local'}"]
    recipe, gets, get = load_recipe(dumped[0], sets), [], Store.get
    dump_here(recipe)
    fetch(recipe, feature_spec(recipe), folder=recipe.paths.shards)
    feed_first(recipe, monkeypatch)
    flip(store_folder / shard_name("train", 0))
    monkeypatch.setattr(Store, "get", lambda *arguments: gets.append(arguments) or get(*arguments))
    with pytest.raises(PipelineError, match=r"features-train-000000.arrow is damaged there, its SHA-256 is not"):
        FedStore(recipe, feature_spec(recipe)).row(0)
    assert len(gets) == 2


def test_a_shared_folder_may_show_a_shard_late(dumped, tmp_path, monkeypatch):
    shutil.copytree(dumped[1], tmp_path / "features")
    recipe = load_recipe(dumped[0], [f"output={tmp_path}", *FED])
    store, path = FedStore(recipe, Manifest.load(dumped[1]).spec), tmp_path / "features" / shard_name("train", 0)
    path.rename(tmp_path / "late")
    with ThreadPoolExecutor(1) as thread:
        row = thread.submit(store.row, 0)
        time.sleep(0.2)
        (tmp_path / "late").rename(path)
        assert row.result().doc_id == store.texts.doc_id(0)
    store.request_shards(ShardRequest([]), notify=False)
    path.unlink()
    monkeypatch.setattr("train.input.features.WARNING_SECONDS", 0)
    with pytest.raises(PipelineError, match=f"{path}: it is missing. Run again"):
        store.row(0)


def fewest(reads: Reads, now: int, room: int) -> int:
    """Return the minimum number of shards to make, by trying all that may stay at each step."""
    best = {frozenset[int](): 0}  # by what is there
    for step in range(len(reads.of_steps)):
        soon, after = frozenset(reads.shards_by_next_use(step)[:now]), dict[frozenset[int], int]()
        for held, made in best.items():
            for kept_shards in combinations(held - soon, min(len(held - soon), room - len(soon))):
                held_now = soon.union(kept_shards)
                after[held_now] = min(made + len(soon - held), after.get(held_now, 1000))
        best = after
    return min(best.values())


def test_no_other_rule_makes_fewer_shards_within_the_room():
    around = Reads([{shard} for shard in (0, 1, 2, 3, 0, 1, 2, 3)], 4)
    assert [around.count_made_shards(1, room) for room in (1, 2, 3, 4)] == [8, 6, 5, 4]
    assert [around.count_made_shards(1, room, trainings=2) for room in (1, 4)] == [16, 4]
    for seed in range(4):
        random = np.random.default_rng(seed)
        steps = [set(random.choice(6, random.integers(1, 3), replace=False).tolist()) for _ in range(30)]
        reads = Reads(steps, 6)
        for step in range(30):
            assert reads.shards_by_next_use(step) == list(
                dict.fromkeys(n for read in steps[step:] for n in sorted(read))
            )
        for now in (2, 3):
            made = [reads.count_made_shards(now, room) for room in range(now, 7)]
            assert made == [fewest(reads, now, room) for room in range(now, 7)]
            assert made[0] > made[1] > made[-1] == 6
        assert (
            reads.max_shards_at_once(1)
            == 2
            <= reads.max_shards_at_once(2)
            == max(map(len, map(set.union, steps, steps[1:])))
        )


def reader_of(lists: list[ShardRequest], want: dict[str, str]) -> Callable[[Recipe], ShardRequest]:
    """A training as its feeder sees it: it requests the next list as soon as it has the shards that it needs soon."""

    def read_wanted(recipe: Recipe) -> ShardRequest:
        held = {name: digest for name, digest in checksums(recipe.paths.features).items() if "features-train" in name}
        assert held.items() <= want.items() and len(held) <= lists[0].room
        assert {record.name for record in Manifest.load(recipe.paths.features).shards_of("train")} == held.keys()
        while lists[0].shards and {shard_name("train", index) for index in lists[0].soon} <= held.keys():
            del lists[0]
        return lists[0]

    return read_wanted


def test_a_feeder_makes_the_shards_of_a_stored_dump_and_keeps_those_that_fit(dumped, tmp_path, monkeypatch):
    recipe, want = prepared(dumped, tmp_path), checksums(dumped[1])
    reads = Order(FedStore(recipe, Manifest.load(recipe.paths.features).spec), recipe.train, recipe.seed).reads
    monkeypatch.setattr("preprocess.dump.feeder.Progress", Shown)
    for room, count in ((3, 16), (4, 9), (5, 5)):
        lists = [*(ShardRequest(reads.shards_by_next_use(step), 3, room) for step in range(20)), ShardRequest([])]
        monkeypatch.setattr("preprocess.dump.feeder.read_shard_request", reader_of(lists, want))
        with without_ray():
            assert feed(recipe)[0].startswith(f"{count} train shards made, none left; ")
        assert reads.count_made_shards(3, room) == count and left(recipe) == []
        done, total = Shown.last.shown[-1]
        assert done == total > 0 and len({done for done, _ in Shown.last.shown}) > 2 * count  # it moves with batches


BEGIN = 1.0  # of the simulated clock, in seconds


class SimulatedCrew:
    """Workers on a simulated clock, each of which takes a second for 1000 tokens, and a training that takes no time
    once it has its shards. The feeder, the order of reading and the requests are the real ones.
    """

    def __init__(self, recipe: Recipe):
        self.now, self.made, self.most, self.recipe = BEGIN, 0, 0, recipe
        store = FedStore(recipe, Manifest.load(recipe.paths.features).spec)
        self._records, self._step = store.records, 0
        self._batches = Batches(store, recipe.train, Horizons([1]), Needs(), recipe.seed, 0, 1)

    def results(self, tasks, _watch) -> Iterator[tuple[None, ShardRecord]]:
        """Stand for `WorkerPool.results`."""
        busy, task = [], next(tasks)
        while task is not None or busy:
            while task not in (None, NO_TASK_YET) and len(busy) < self.recipe.features.workers:
                record = self._records[task.index]
                heapq.heappush(busy, (self.now + record.tokens / 1000, task.index, record))
                task, self.most = next(tasks, None), max(self.most, len(busy))
            self.now, _, record = heapq.heappop(busy)
            self.made += record.tokens
            yield None, record
            task = next(tasks, None) if task in (None, NO_TASK_YET) else task

    def read_request(self, recipe: Recipe) -> ShardRequest:
        """Train as far as the shards allow, request the next ones as training does, and read the request."""
        held = {record.index for record in Manifest.load(recipe.paths.features).shards_of("train")}
        order = self._batches.order
        while self._step < order.steps and order.reads.of_steps[self._step] <= held:
            self._step += 1
        if self._step == order.steps:
            return ShardRequest([])
        self._batches._request_shards(self._step)
        return read_shard_request(recipe)


def test_a_window_caps_the_speed_of_more_workers_than_it_has_room_for(dumped, tmp_path, monkeypatch):
    """Shards of two windows are made at a time, as `plan` says, however many workers there are; what the feeder says of
    their waiting is so. A window of as many shards as there are workers keeps all of them at work.
    """
    sets = ["features.keep=window", "features.rows_per_shard=2", "train.global_batch=1", "train.micro_batch=1"]
    speeds = {}
    for window, workers in ((1, 2), (1, 4), (1, 6), (2, 6), (3, 6), (6, 6)):
        more = [f"output={tmp_path / f'{window}-{workers}'}", f"train.window={window}", f"features.workers={workers}"]
        recipe = load_recipe(dumped[0], [*sets, *more])
        dump_here(recipe)
        crew = SimulatedCrew(recipe)
        clock = SimpleNamespace(monotonic=lambda crew=crew: crew.now, sleep=lambda _: None)
        with monkeypatch.context() as patched:
            patched.setattr("preprocess.dump.feeder.time", clock)
            patched.setattr("preprocess.dump.feeder.read_shard_request", crew.read_request)
            patched.setattr(WorkerPool, "results", lambda _, *inputs, crew=crew: crew.results(*inputs))
            (line,) = feed(recipe)
        speeds[window, workers] = speed = crew.made / (crew.now - BEGIN)
        print(f"window of {window}, {workers} workers: {speed:,.0f} tokens/s, {crew.most} shards at a time; {line}")
        assert crew.most == min(workers, count_shards_ahead(recipe, 40, 1))
        assert f"{1000 * workers:,} tokens/s, waiting {1 - speed / 1000 / workers:.0%} for room" in line
    assert speeds[1, 2] == speeds[1, 4] == speeds[1, 6] <= 2000
    assert speeds[1, 6] < speeds[2, 6] <= 4000 < speeds[3, 6] < 0.9 * 6000 < speeds[6, 6]


def test_what_was_fed_goes_and_what_a_dump_kept_stays(dumped, tmp_path, monkeypatch):
    """The rule also holds if all shards fitted the disk when the feeder was killed."""
    recipe, want, most = prepared(dumped, tmp_path / "fed"), checksums(dumped[1]), []

    def until(shards: int, then: ShardRequest | BaseException) -> Callable[[Recipe], ShardRequest]:
        def read_wanted(recipe: Recipe) -> ShardRequest:
            most.append(len(Manifest.load(recipe.paths.features).shards_of("train")))
            if most[-1] != shards:
                return ShardRequest(list(range(5)), min(shards, 5), shards)
            if isinstance(then, BaseException):
                raise then
            return then

        return read_wanted

    with without_ray():
        monkeypatch.setattr("preprocess.dump.feeder.read_shard_request", until(5, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            feed(recipe)
        most.clear()
        monkeypatch.setattr("preprocess.dump.feeder.read_shard_request", until(3, ShardRequest([])))
        assert feed(recipe) == ["0 train shards made, none left"] and most == [5, 3] and left(recipe) == []
        shutil.copytree(dumped[1], tmp_path / "kept/features")
        kept_recipe = load_recipe(dumped[0], [f"output={tmp_path / 'kept'}", *FED])
        monkeypatch.setattr("preprocess.dump.feeder.read_shard_request", lambda _: ShardRequest([]))
        assert feed(kept_recipe) == ["0 train shards made, 5 left"] and checksums(kept_recipe.paths.features) == want
        flip(kept_recipe.paths.features / shard_name("train", 2))
        with pytest.raises(PipelineError, match=r"kept all shards, but 1 of them .* features.keep='all'"):
            feed(kept_recipe)
        dump_here(load_recipe(dumped[0], [f"output={kept_recipe.output}"]))
        manifest = dump_here(
            load_recipe(dumped[0], [f"output={kept_recipe.output}", *FED, "data.calibration_prompts=2"])
        )
        assert (
            checksums(kept_recipe.paths.features).items()
            >= {name: want[name] for name in want if "-train-" in name}.items()
        )
        assert not manifest.fed and manifest.missing_rows("train") == 0


def test_a_feeder_of_another_engine_is_refused(dumped, tmp_path):
    recipe = prepared(dumped, tmp_path)
    manifest = Manifest.load(recipe.paths.features)
    manifest.spec = replace(manifest.spec, engine="vllm", engine_version="0.32.0")
    manifest.save(recipe.paths.features)
    with pytest.raises(PipelineError, match=r"computed by vllm 0.32.0, this run has transformers"):
        feed(recipe)


def test_what_a_fed_training_cannot_have_is_refused(dumped, tmp_path, monkeypatch):
    recipe = prepared(dumped, tmp_path)
    with pytest.raises(PipelineError, match=r"disk_bytes=1,000, but the 3 shards .* take up to 287,136: raise"):
        train_here(dumped, tmp_path, *FED, "features.disk_bytes=1_000")
    with pytest.raises(PipelineError, match=r"was dumped for features.keep='window': run the dump again"):
        train_here(dumped, tmp_path)
    bad = ShardRecord("", "train", 0, 7, 1, 1, 1, "", rejected={"doc1": "features_not_finite"})
    monkeypatch.setattr("preprocess.dump.feeder.run_tasks", lambda *_: [bad])
    with pytest.raises(PipelineError, match=r"dialogue doc1: features_not_finite. A training that is fed"):
        feed(recipe)
    assert dump_here(load_recipe(dumped[0], [f"output={tmp_path}"])).total("train", "rows") == 40
    assert checksums(recipe.paths.features) == checksums(dumped[1])
