"""The dump as a user starts it: the script alone, a Ray job on a cluster, and what is left when it is killed."""

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import ANSWERS, MANIFEST, SPLITS, Manifest, usable_texts
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.recipe.recipe import Recipe
from pipeline.running.state import features_state
from preprocess.dump import driver
from preprocess.dump.driver import dump
from preprocess.dump.plan import DumpPlan
from preprocess.dump.worker import FeatureWorker
from tests import cluster
from tests.kit import (
    BIN,
    Shown,
    checksums,
    dump_command,
    dump_here,
    flip,
    kill_when,
    recipe_tree,
    run_command,
    run_warm,
    save_tiny_target,
    wait_until,
    write_recipe,
    write_sharegpt,
)
from train.input import features as training

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that everyone may use, as /tmp, for the Ray of a command."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.fixture(scope="module")
def environment_of_place(place, warm, tmp_path_factory) -> dict[str, str]:
    """The environment of a command whose Ray uses that folder, and no token of the tests."""
    return {**warm, "RAY_TMPDIR": str(place), "HOME": str(tmp_path_factory.mktemp("home")), "RAY_AUTH_TOKEN": ""}


@pytest.fixture(scope="module")
def job(tiny_target, tmp_path_factory, environment_of_place) -> tuple[Path, Path, dict[str, str]]:
    """(recipe file, features folder, checksum by shard) of an undisturbed dump with many small shards."""
    folder = tmp_path_factory.mktemp("dump")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    tree["features"]["rows_per_shard"] = 2
    recipe = write_recipe(tree, folder / "recipe")
    done = run_warm(dump_command(recipe), **environment_of_place)
    assert done.returncode == 0, done.stderr
    assert "60 records = " in done.stdout
    return recipe, folder / "run" / "features", checksums(folder / "run" / "features")


def test_of_its_ray_no_folder_and_no_token_is_left(job, place, environment_of_place):
    assert not list(place.iterdir())
    assert not [path for path in Path(environment_of_place["HOME"]).rglob("*token*") if path.stat().st_mode & 0o077]


def test_a_second_run_finds_everything_done(job):
    recipe, features, before = job
    stamps = {path: path.stat().st_mtime_ns for path in features.glob("*.arrow")}
    report = dump(load_recipe(recipe))
    assert report[0].startswith("60 records = ")
    assert {path: path.stat().st_mtime_ns for path in features.glob("*.arrow")} == stamps
    assert checksums(features) == before


def tokens_of(manifest: Manifest, *splits: str) -> int:
    return sum(manifest.total(split, "tokens") for split in splits)


@pytest.mark.parametrize("most", [2000, 1_000_000, None])
def test_its_progress_counts_all_tokens_and_ends_at_its_total(tiny_recipe, monkeypatch, most):
    """Those of training, validation and answers; `data.max_tokens` is of the first: its last dialogue may go beyond,
    the source may hold fewer. Nobody knows the total of a source without it before all is read.
    """
    monkeypatch.setattr(driver, "Progress", Shown)
    data = tiny_recipe.data.model_copy(update={"max_tokens": most})
    recipe = tiny_recipe.model_copy(update={"data": data})
    manifest = dump_here(recipe)
    all_tokens = tokens_of(manifest, *SPLITS, ANSWERS)
    assert Shown.last.shown[0] == (0, 0) and Shown.last.shown[-1] == (all_tokens, all_tokens)
    totals = [total for _, total in Shown.last.shown if total]
    assert most is None or totals[0] > most  # what is held out is in it from the first task on
    assert most != 2000 or max(totals) < 1.5 * all_tokens
    dump_here(recipe.model_copy(update={"data": data.model_copy(update={"calibration_prompts": 3})}))
    kept_tokens = tokens_of(manifest, *SPLITS)  # finished shards count as done; the answers are generated again
    all_again = tokens_of(Manifest.load(recipe.paths.features), *SPLITS, ANSWERS)
    assert Shown.last.shown[0] == (kept_tokens, 0) and Shown.last.shown[-1] == (all_again, all_again)


def test_tokens_move_within_a_shard(tiny_recipe, monkeypatch):
    """Progress moves by batches, for training as for validation, and answer by answer."""
    monkeypatch.setattr(driver, "Progress", Shown)
    features = tiny_recipe.features.model_copy(update={"rows_per_shard": 100, "batch_tokens": 300})
    manifest = dump_here(tiny_recipe.model_copy(update={"features": features}))
    assert len(manifest.shards) == 2 and len(manifest.answers) == 1
    shard_ends, end = [], 0
    for record in (*manifest.shards, *manifest.answers):  # as they were made
        begin, end = end, end + record.tokens
        shard_ends.append(len({done for done, _ in Shown.last.shown if begin < done < end}))
    assert min(shard_ends) >= 3 and shard_ends[0] > 20
    done = [done for done, _ in Shown.last.shown]
    assert done == sorted(done) and done[-1] == end


@pytest.mark.parametrize("turns", ["all", "last"])
def test_each_token_of_the_targets_own_answers_is_counted_once(tiny_recipe, tmp_path, turns):
    tree = tiny_recipe.model_dump(mode="json")
    tree["data"] |= {"answers": "target", "train_turns": turns, "max_length": 400}
    tree["regenerate"] = {"temperature": 1.0, "max_new_tokens": 12}
    recipe = Recipe.model_validate(tree)
    task = next(task for task in DumpPlan(recipe, load_tokenizer(recipe.target)).tasks() if task.split == "train")
    worker = FeatureWorker(recipe, tmp_path, feature_spec(recipe))
    record = worker.work(task)
    assert worker._active_work.done == record.tokens > 0


def test_an_interrupted_dump_says_what_is_made_again(tiny_recipe, monkeypatch):
    """The tokens of the shard in work; a finished one stays."""

    class Interrupted(FeatureWorker):
        def _forward(self, batch):
            if any(document.doc_id == "doc40" for document in batch):
                raise KeyboardInterrupt
            return super()._forward(batch)

    monkeypatch.setattr(driver, "Progress", Shown)
    monkeypatch.setattr(driver, "FeatureWorker", Interrupted)
    features = tiny_recipe.features.model_copy(update={"batch_tokens": 100})
    with pytest.raises(KeyboardInterrupt) as caught:
        dump_here(tiny_recipe.model_copy(update={"features": features}))
    kept_tokens = tokens_of(Manifest.load(tiny_recipe.paths.features), *SPLITS)
    lost = Shown.last.shown[-1][0] - kept_tokens
    assert kept_tokens > 0 and lost > 0
    assert caught.value.__notes__ == [f"but the {lost:,} tokens of what is in work, which are made again"]


def open_to_others(place: Path) -> list[Path]:
    """Sockets in the folder that another user can reach."""
    sockets = [path for path in place.rglob("*") if path.is_socket()]
    assert any(path.name == "raylet" for path in sockets)
    within = [(path, [parent for parent in path.parents if place in parent.parents]) for path in sockets]
    return [path for path, parents in within if all(parent.stat().st_mode & 0o011 for parent in parents)]


def test_killed_in_the_middle_and_run_again_gives_the_same_bytes(job, tmp_path, place, environment_of_place):
    """This process alone dumps it again: a shard does not depend on its writer. No other user reaches the Ray that
    worked on it, neither while it runs nor what is left of it.
    """
    recipe, _, expected = job
    command = dump_command(recipe, f"output={tmp_path}")
    features, reached = tmp_path / "features", []

    def happened() -> bool:
        if begun := (features / MANIFEST).exists():
            reached.extend(open_to_others(place))
        return begun

    kill_when(command, happened, **environment_of_place)
    assert not reached and not open_to_others(place)
    left = Manifest.load(features)
    assert not left.complete and 0 < len(left.shards) < len(expected)
    dump_here(load_recipe(recipe, [f"output={tmp_path}"]))
    assert checksums(features) == expected
    assert Manifest.load(features).complete
    assert not list(features.glob(".*.tmp"))


def test_damaged_shards_and_tables_are_redone(job, tmp_path):
    recipe, features, expected = job
    copy = tmp_path / "features"
    shutil.copytree(features, copy)
    truncated, flipped, deleted = (copy / f"features-train-00000{number}.arrow" for number in (0, 1, 2))
    os.truncate(truncated, truncated.stat().st_size // 2)
    flip(flipped)
    deleted.unlink()
    (copy / "text-validation.arrow").unlink()
    (copy / "text-answers-000001.arrow").write_bytes(b"half")
    dump_here(load_recipe(recipe, [f"output={tmp_path}"]))
    assert checksums(copy) == expected


def test_other_answers_keep_the_rest_of_the_dump(job, tmp_path):
    """More calibration prompts, or longer answers: only those shards are written again, and training wants that
    first.
    """
    recipe, features, before = job
    shutil.copytree(features, tmp_path / "features", copy_function=shutil.copy2)
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "features").glob("*.arrow")}
    sets = [f"output={tmp_path}", "data.calibration_prompts=2", "features.answer_tokens=5"]
    changed = load_recipe(recipe, sets)
    message = r"\(data.calibration_prompts: 4 -> 2, features.answer_tokens: 12 -> 5\)"
    with pytest.raises(PipelineError, match=message):
        training.open_stores(changed, feature_spec(changed))
    assert features_state(changed) == (False, "answers to calibration prompts have to be generated again")
    dump_here(changed)
    assert "the target's own to 2 calibration prompts" in "\n".join(dump(changed))
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "features").glob("*.arrow")}
    answers = {name for name in before if "answers" in name}
    assert len(answers) == 4 and after.keys() == before.keys() - {
        "features-answers-000001.arrow",
        "text-answers-000001.arrow",
    }
    assert {name for name in after if after[name] != stamps[name]} == {
        "features-answers-000000.arrow",
        "text-answers-000000.arrow",
        "text-train.arrow",
        "text-validation.arrow",
    }
    manifest = Manifest.load(tmp_path / "features")
    assert manifest.complete and 2 < manifest.total(ANSWERS, "trained_tokens") <= 10


def test_a_missing_manifest_has_every_shard_written_anew(job, tmp_path):
    recipe, features, expected = job
    shutil.copytree(features, tmp_path / "run/features")
    (tmp_path / "run/features" / MANIFEST).unlink()
    dump_here(load_recipe(recipe, [f"output={tmp_path / 'run'}"]))
    assert checksums(tmp_path / "run/features") == expected


def test_two_jobs_do_not_share_a_folder(job, tmp_path):
    recipe, _, _ = job
    (tmp_path / "run/features").mkdir(parents=True)
    with (
        FileLock(tmp_path / "run/features/.lock"),
        pytest.raises(PipelineError, match="another dump is writing here"),
    ):
        dump(load_recipe(recipe, [f"output={tmp_path / 'run'}"]))


def test_features_of_another_target_are_not_mixed_in(job, tmp_path):
    recipe, features, _ = job
    second_target = save_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(PipelineError, match="another target model"):
        dump(load_recipe(recipe, [f'target.model="{second_target}"']))
    assert Manifest.load(features).complete


LIMITED = """
import os, resource, signal, sys
from pathlib import Path

sys.path.insert(0, os.getcwd())
from pipeline.artifacts.features import feature_spec
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.load import load_recipe
from pipeline.running import entry
from preprocess.dump.plan import DumpPlan
from preprocess.dump.worker import FeatureWorker

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
recipe = load_recipe(sys.argv[1])
task = next(iter(DumpPlan(recipe, load_tokenizer(recipe.target)).tasks()))
worker = FeatureWorker(recipe, Path(sys.argv[2]), feature_spec(recipe))
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
entry.run(lambda: worker.work(task))
"""


def test_full_disk_is_one_clear_error_and_leaves_nothing_half_written(job, tmp_path):
    recipe, _, _ = job
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    full = run_warm([sys.executable, str(script), str(recipe), str(tmp_path / "features")])
    assert full.returncode == 2
    assert full.stderr.splitlines()[-1].startswith("error: no space to write features-train-000000.arrow")
    assert [path.name for path in (tmp_path / "features").iterdir()] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("3", "no list of records"),
        ('[{"id": "doc0", "text": "once upon a time"}]', "its 1 dialogues hold out 0, .* Give more data"),
        ('[{"id": "a", "conversations": []}, {"id": "b"}]', "holds no usable dialogue: 2 records"),
    ],
)
def test_unusable_data_is_one_clear_error(job, tmp_path, content, message):
    recipe, _, _ = job
    source = tmp_path / "data.json"
    source.write_text(content)
    sets = [f'data.source="{source}"', f"output={tmp_path / 'run'}"]
    with pytest.raises(PipelineError, match=message):
        dump_here(load_recipe(recipe, sets))


def test_a_source_that_changed_since_the_dump_was_started_is_refused(job, tmp_path):
    recipe, features, _ = job
    shutil.copytree(features, tmp_path / "run/features")
    manifest = Manifest.load(tmp_path / "run/features")
    manifest.complete, manifest.shards = False, manifest.shards[:3]
    manifest.save(tmp_path / "run/features")
    source = Path(load_recipe(recipe).data.source)
    before = source.read_text()
    try:
        source.write_text(json.dumps(json.loads(before)[1:]))
        with pytest.raises(PipelineError, match="was made from other dialogues"):
            dump_here(load_recipe(recipe, [f"output={tmp_path / 'run'}"]))
    finally:
        source.write_text(before)


@pytest.mark.parametrize("store", [False, True], ids=["on disk", "in a store"])
def test_a_source_that_was_shortened_does_not_damage_the_dump(job, tmp_path, store):
    """The dialogues of the last shard are gone, so no shard is made of others; only the accounting can tell."""
    recipe, features, expected = job
    shutil.copytree(features, tmp_path / "run/features")
    full_recipe, place = load_recipe(recipe), tmp_path / ("store" if store else "run/features")
    sets = [f"output={tmp_path / 'run'}", *([f'features.store="file://{place}"'] if store else [])]
    dump_here(load_recipe(recipe, sets))
    (place / "heldout_prompts.jsonl").unlink()
    (tmp_path / "run/features/heldout_prompts.jsonl").unlink(missing_ok=True)
    source = Path(full_recipe.data.source)
    before, manifest = source.read_text(), Manifest.load(features)
    texts, last = usable_texts(features, manifest, "train"), manifest.shards_of("train")[-1]
    removed_ids = {texts.doc_id(len(texts) - 1 - number) for number in range(last.rows)}
    try:
        source.write_text(json.dumps([record for record in json.loads(before) if record["id"] not in removed_ids]))
        with pytest.raises(PipelineError, match=r"are not the \d+ records of"):
            dump_here(load_recipe(recipe, sets))
    finally:
        source.write_text(before)
    assert checksums(place) == expected


def test_ray_job_submit_on_a_cluster(job, tmp_path, taking_jobs):
    """Its workers start by themselves, in the job's copy of the checkout; there is room for one less than asked for."""
    recipe, _, expected = job
    submit = [str(BIN / "ray"), "job", "submit", "--address", taking_jobs.dashboard, "--working-dir", ".", "--"]
    sets = override_arguments(
        [f"output={tmp_path / 'run'}", "features.workers=3", f"features.cpus_per_worker={cluster.CPUS // 2}"]
    )
    script = f"pwd && python preprocess/dump_features.py {shlex.join([str(recipe), *sets])}"
    tries = []  # `ray start` returns before the agent that takes jobs is there

    def taken() -> bool:
        tries.append(run_command([*submit, "bash", "-c", script]))
        return "No available agent" not in tries[-1].stdout + tries[-1].stderr

    wait_until(taken)
    done = tries[-1]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 records = " in done.stdout and "/runtime_resources/" in done.stdout
    assert checksums(tmp_path / "run" / "features") == expected


def test_a_ray_job_with_a_relative_output_is_refused(job, tmp_path, monkeypatch):
    recipe, _, _ = job
    folder = tmp_path / "runtime_resources/working_dir_files/_ray_pkg_0"  # as the job above is in
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(PipelineError, match="runs in a temporary copy of the checkout"):
        dump(load_recipe(recipe, ["output=runs/relative"]))
