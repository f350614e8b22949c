"""Checks across the sections of a recipe; each section checks its own keys by itself."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import Method

if TYPE_CHECKING:
    from pipeline.recipe.recipe import Recipe

PLAIN = "plain"  # decoding without a draft: the name of every measurement's baseline
TUNED = "-tuned"  # suffix of the names of methods that eval/tune.py chose


def complaints(recipe: "Recipe") -> Iterator[str]:
    """Yield the contradictions in a recipe. Stop at the first: later checks assume that earlier ones passed."""
    yield from _check_drafts(recipe)
    yield from _check_devices(recipe)
    yield from _check_training(recipe)
    yield from _check_evaluation(recipe)


def _check_drafts(recipe: "Recipe") -> Iterator[str]:
    """Yield contradictions in the drafts, such as a missing section [draft.NAME] or a start without training."""
    drafts, released = recipe.draft, recipe.publish.draft
    if not drafts:
        yield "no draft: add a section [draft.NAME] with kind = 'jakiro'"
    if released not in drafts:
        yield f"publish.draft={released!r} is not one of the drafts {sorted(drafts)}"
    if not drafts[released].trained:
        yield f"publish.draft={released!r} is not trained: there are no weights to release"
    for name in recipe.published:
        if name not in drafts or not drafts[name].trained:
            yield f"published.{name} is not a draft with weights: add its section [draft.{name}]"
    for name, config in drafts.items():
        if config.start_differs and not config.start:
            yield f"draft.{name}.start_differs lists settings that may differ from its start, but it has no start"
        if config.start and name not in recipe.to_train:
            yield f"draft.{name}.start={config.start!r} starts a training, but this recipe does not train it"


def _check_devices(recipe: "Recipe") -> Iterator[str]:
    """Yield contradictions between the target and its workers about GPUs."""
    device, features, measuring = recipe.target.device, recipe.features, recipe.eval
    by_engine, ranks, train_gpus = recipe.target.engine != "transformers", recipe.train.ranks, recipe.train.gpus
    for section, gpus in (("features", features.gpus), ("train", train_gpus)):
        if gpus and device == "cpu":
            yield f"{section}.gpus={gpus}, but target.device='cpu'"
    are_disjoint = bool(features.gpus and train_gpus) and not set(features.gpus or []) & set(train_gpus or [])
    if features.keep == "window" and device != "cpu" and (features.gpus or train_gpus) and not are_disjoint:
        yield (
            f"features.gpus={features.gpus} and train.gpus={train_gpus}, but features.keep='window' dumps and trains "
            "at the same time: give each GPUs of its own, or set neither"
        )
    if train_gpus and (ranks or 0) > len(train_gpus):
        yield f"train.ranks={ranks}, but train.gpus={train_gpus}: each rank requires its own GPU"
    if by_engine and features.gpus_per_worker is not None:
        yield "features.gpus_per_worker: the number of an engine's GPUs is target.tensor_parallel"
    if device != "spread":
        if (features.gpus_per_worker or 0) > 1:
            yield (
                f"features.gpus_per_worker={features.gpus_per_worker:g}, but target.device={device!r} uses one: set "
                "target.device='spread'"
            )
        return
    for name, config in recipe.draft.items():
        if config.runs_the_target:
            yield (
                f"target.device='spread', but draft.{name} runs through the target's blocks, which have to be on one "
                "device"
            )
    worker_sections: dict[str, Any] = {} if by_engine else {"features": features}
    worker_sections |= {"eval": measuring} if measuring.workers > 1 else {}
    for section, config in worker_sections.items():
        if (config.gpus_per_worker or 0) < 1:
            yield (f"target.device='spread', but {section}.gpus_per_worker gives a worker no GPUs of its own: set it")
    if recipe.train.decode != "never":
        yield (
            f"train.decode={recipe.train.decode!r} loads the target next to the training of rank 0, but "
            "target.device='spread' uses all GPUs"
        )
    if measuring.compile:
        yield "eval.compile=true, but target.device='spread': a spread target cannot be compiled into one graph"


def _check_training(recipe: "Recipe") -> Iterator[str]:
    """Yield contradictions between [train] and the other sections."""
    train, data = recipe.train, recipe.data
    try:
        train.accumulation(train.ranks or 1)
    except PipelineError as error:
        yield str(error)
    if recipe.features.keep == "window" and recipe.features.store and not recipe.paths.copies:
        yield (
            "features.keep='window' with features.store requires a folder on each node's own disk for its copies of "
            "shards: set train.shards to a folder other than OUTPUT/features"
        )
    if unknown := sorted(train.learning_rates.keys() - set(recipe.to_train)):
        yield (
            f"train.learning_rates.{unknown[0]}: no draft of that name is trained; expected one of "
            f"{', '.join(recipe.to_train)}"
        )
    for key, plain in (("keep", "last"), ("patience", None), ("decode", "never")):
        if not data.calibration_prompts and getattr(train, key) != plain:
            yield (
                f"train.{key}={getattr(train, key)!r} requires the answers to calibration prompts, but "
                "data.calibration_prompts=0"
            )
    if data.answers == "target":
        if recipe.features.keep == "window":
            yield (
                "features.keep='window' computes states of existing texts, but data.answers='target': run jakiro "
                "regenerate first and set data.source to its dialogues.jsonl, or set keep='all'"
            )
        if data.max_tokens:
            yield (
                f"data.max_tokens={data.max_tokens} counts tokens of answers that data.answers='target' has yet to "
                "generate: set data.max_dialogues instead"
            )
    if train.pack_tokens and train.pack_tokens < data.max_length - 1:
        yield (
            f"train.pack_tokens={train.pack_tokens} has no room for a dialogue of data.max_length={data.max_length} "
            "tokens"
        )


def _check_evaluation(recipe: "Recipe") -> Iterator[str]:
    """Yield methods and benchmarks that cannot be measured."""
    for name in (*recipe.draft, *recipe.eval.methods):
        if name.endswith(TUNED):
            yield f"{name!r}: names that end in {TUNED} are reserved for eval/tune.py's trees; choose another"
    for name in {**recipe.draft, **recipe.eval.methods}:
        where = f"eval.methods.{name}" if name in recipe.eval.methods else f"draft.{name}"
        for complaint in _check_method(recipe, name, recipe.eval.methods.get(name, Method())):
            yield f"{where}{complaint}"
    for name, benchmark in recipe.eval.benchmarks.items():
        if benchmark.held_out and (benchmark.prompts or 0) > recipe.data.heldout_prompts:
            yield (
                f"eval.benchmarks.{name}.prompts={benchmark.prompts} is more than data.heldout_prompts="
                f"{recipe.data.heldout_prompts}, which the dump keeps"
            )


def _check_method(recipe: "Recipe", name: str, method: Method) -> Iterator[str]:
    """Yield the contradictions of a method, such as a missing draft or a tree that its sources cannot fill."""
    draft = method.draft or name
    if name == PLAIN or (name in recipe.draft and draft != name):
        yield ": that name is taken; choose another"
    if draft not in recipe.draft:
        yield f".draft={draft!r} is not one of the drafts {sorted(recipe.draft)}"
    if name in recipe.draft and method.secondary:
        yield (
            ": a draft of that name stands alone; give the method with secondary sources a name of its own, with draft "
            f"= {name!r}"
        )
    for source in method.secondary:
        is_secondary = source in recipe.draft and recipe.draft[source].may_be_secondary
        if not is_secondary or method.secondary.count(source) > 1:
            yield (
                f".secondary={source!r}: expected drafts of the recipe that take no forwards, each once: add a section "
                "[draft.prompt-lookup] with kind = 'prompt-lookup'"
            )
    if method.secondary and not recipe.draft[draft].trained:
        yield f".draft={draft!r} is not trained: it has no secondary sources"
    try:
        recipe.resolve_method(name)
    except ValueError as error:
        shared = f". Its tree is eval.tree: change that, or give it another in [eval.methods.{name}.tree]"
        yield f": {error}{'' if method.tree else shared}"
