"""Measure the recipe's drafts next to plain decoding, write the report and the release folder; upload only on --push.

python eval/main.py RECIPE [--tuned] [--push OWNER/NAME]
python eval/main.py OWNER/NAME[@REVISION]       (a published release of ours, on this machine)
"""

import argparse
import signal
import sys
from dataclasses import asdict
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import prints nothing

import torch

from eval.measure import plots, report
from eval.measure.harness import pool_outcomes
from eval.measure.tasks import EvalJob, decode_all, evaluation_lock, make_job, methods_tuned_as_written
from eval.published import write_release_recipe
from eval.release.hub import require_repository_name
from eval.release.publish import build_release, push
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import measurement_versions, provenance, write_provenance
from pipeline.artifacts.reports import (
    REPORT,
    TABLE,
    digest_rows,
    make_origin,
    read_report,
    read_rows,
    read_tuned_trees,
    replace_rows,
)
from pipeline.basics.files import sha256, write_sealed, write_text
from pipeline.basics.progress import set_record_path
from pipeline.basics.public import public_name
from pipeline.decoding.config import Method
from pipeline.drafts import build, kind_key, parameter_count
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.lm.model import count_parameters, identify, load_config, load_tokenizer
from pipeline.lm.template import template_settings
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry


def is_measured(path: Path, key: str) -> bool:
    """Return whether the report is of this evaluation, by this version of the measurement."""
    saved_report = read_report(path) if path.exists() else {}
    return (saved_report.get("key"), saved_report.get("code")) == (key, measurement_versions())


def describe_method(job: EvalJob, method: Method) -> dict:
    """Return the report's facts about a method, without measured figures."""
    recipe, name = job.recipe, method.draft
    config = recipe.draft[name]
    training = checkpoint.read_config(recipe.paths.draft(name)).training if config.trained else {}
    return {
        "kind": kind_key(config),
        "parameters": training.get("parameters", 0) or count_untrained_parameters(recipe, name),
        "training": training,
        "method": method.to_json(),
        "weights_sha256": None if config.corpus else job.digests[name],
        "corpora": [job.digests[source] for source in method.sources if recipe.draft[source].corpus],
    }


def count_untrained_parameters(recipe: Recipe, name: str) -> int:
    """Return the parameters of a draft that is a small model, or the target's MTP head; else 0."""
    if name in recipe.small_models:
        return count_parameters(recipe.small_models[name])
    if recipe.draft[name].trained or not recipe.draft[name].has_module:
        return 0
    with torch.device("meta"):
        return parameter_count(build(recipe.draft[name], draft_shapes(load_config(recipe.target))))


def collect_settings(recipe: Recipe) -> dict:
    """Return the settings that figures depend on, in addition to hardware, prompts and methods."""
    config = recipe.eval
    kernels = {"dtype": config.dtype, "packed": config.pack_linears, "compiled": config.compile}
    sampling = {"top_k": config.top_k, "top_p": config.top_p}
    return kernels | sampling | {"max_new_tokens": config.max_new_tokens, "workers": config.workers}


def measure(job: EvalJob) -> dict:
    """Run the benchmarks and write rows, report.json, table.md and the plots into the run's eval folder."""
    recipe, methods, fleet = job.recipe, job.methods, None
    read_rows(recipe.paths.eval)  # a damaged table is refused now, not after all decoding
    if recipe.eval.workers > 1:
        from eval.measure.fleet import decode as fleet  # import Ray only if it is used
    outcomes = decode_all(job, fleet)
    records, gates, left_out = pool_outcomes(outcomes)
    # of the processes that decoded, not of a driver
    hardware = " / ".join(sorted({outcome.hardware for _, outcome in outcomes}))
    folder, settings = recipe.paths.eval, collect_settings(recipe)
    origins = {
        name: make_origin(
            recipe, method.draft, hardware=hardware, settings=settings, tree=method.resolved_tree.to_json()
        )
        for name, method in methods.items()
    }
    rows = report.build_rows(records, gates, origins)
    metrics = {name: checkpoint.checked_metrics(recipe.paths.draft(name)) for name in recipe.trained}
    trees = {name: method.resolved_tree for name, method in methods.items()}
    forwards = {name: tree.forwards for name, tree in trees.items() if tree.forwards < tree.depth}
    plot_files = plots.draw(rows, forwards, recipe.eval.of_contexts, metrics, folder)
    tokenizer = load_tokenizer(recipe.target)
    measured = {
        "name": recipe.name,
        "key": job.key,
        "code": measurement_versions(),
        "provenance": provenance(recipe) | {"hardware": hardware},
        "target": public_name(recipe.target.model),
        "settings": settings,
        "template": template_settings(tokenizer, recipe.target),
        "target_identity": asdict(identify(recipe.target)),
        "definitions": report.explain_figures(),
        "drafts": {name: describe_method(job, method) for name, method in methods.items()},
        "tuned": read_tuned_trees(recipe.paths.tuned),
        "rows": digest_rows(rows),
        "prompts_left_out": left_out,  # too long for the target's positions
        "samples": report.select_samples(job, records, tokenizer),
        "table": report.format_summary(rows),
        "plots": {path.name: sha256(path) for path in plot_files},
    }
    (folder / REPORT).unlink(missing_ok=True)  # no report lies next to the rows of another one
    replace_rows(folder, rows, all_methods=True)
    write_provenance(folder, recipe)
    write_text(folder / TABLE, report.format_table(rows) + "\n")
    write_sealed(folder / REPORT, measured)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--tuned", action="store_true", help="leave out the recipe's tree where eval/tune.py chose one")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the release folder to this Hub repository")
    parser.add_argument("--public", action="store_true", help="make a repository that --push creates public")
    arguments = parser.parse_args()
    recipe_file, notes = write_release_recipe(arguments.recipe, arguments.overrides) or (arguments.recipe, [])
    for note in notes:
        print(note)
    recipe = load_recipe(recipe_file, arguments.overrides, begin=True)
    if arguments.push:
        require_repository_name(arguments.push)
    set_record_path(recipe.paths.run, "eval")
    path = recipe.paths.eval / REPORT
    with evaluation_lock(recipe):
        job = make_job(recipe, arguments.tuned)
        for name in methods_tuned_as_written(recipe):
            print(f"{name}: the tuned tree is the recipe's, so it is measured once, as {name}")
        measured = read_report(path) if is_measured(path, job.key) else measure(job)
        print(measured["table"])
        release, notes = build_release(recipe)
    print("\n".join([f"release: {release}/", *notes]))
    for plot in measured["plots"]:
        print(f"plot: {release / plot}")
    if arguments.push:
        print(f"uploading to {arguments.push} ...", flush=True)
        print("\n".join(push(release, arguments.push, private=not arguments.public)))


if __name__ == "__main__":
    entry.run(main, keeps=True)
