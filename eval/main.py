"""Measures the recipe's drafts beside plain decoding, writes the report and the release folder; uploads only on --push.

python eval/main.py RECIPE [--push OWNER/NAME]
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder

from dataclasses import asdict

from eval import plots, publish, report
from eval.bench import Bench
from eval.prompts import load_prompts
from pipeline import checkpoint, entry
from pipeline.drafts import Draft, parameter_count
from pipeline.errors import PipelineError
from pipeline.files import read_json, sha256, write_json, write_text
from pipeline.provenance import provenance, write_provenance
from pipeline.recipe import Recipe, add_recipe_arguments, load_recipe
from pipeline.target import Ends, Target, fingerprint, pack_linears


def load_drafts(recipe: Recipe, target: Target) -> dict[str, Draft]:
    """Every draft of the recipe, bound to the target, in evaluation's dtype."""
    mark = fingerprint(recipe.target)
    ends = Ends(target.embedding_VD.to(target.device), target.head, mark)
    drafts = {}
    for name, config in sorted(recipe.draft.items()):
        checkpoint.require_trained_under(recipe, name)
        draft = checkpoint.load(recipe.draft_dir(name), mark, config.tree).to(target.device, target.dtype)
        draft.bind(ends)
        drafts[name] = draft
    return drafts


def pack(target: Target, drafts: dict[str, Draft]) -> None:
    """The same packed kernels for everything that decodes. Raises PipelineError where there are none."""
    if target.device.type != "cpu":
        raise PipelineError(
            f"eval.pack_linears=true is for CPUs, and the target is on {target.device}: set it to false"
        )
    for draft in drafts.values():
        pack_linears(draft)
        if draft.ends.head is not target.head:
            pack_linears(draft.ends.head)
    pack_linears(target.decoder)
    pack_linears(target.head)


def measured_already(recipe: Recipe, path: Path) -> bool:
    if not path.exists():
        return False
    found = read_json(path)
    files = {name: recipe.draft_dir(name) / checkpoint.WEIGHTS for name in recipe.draft}
    weights = {name: sha256(file) if file.exists() else None for name, file in files.items()}
    same_weights = {name: facts["weights_sha256"] for name, facts in found["drafts"].items()} == weights
    return same_weights and found["provenance"]["recipe_hash"] == recipe.hash


def measure(recipe: Recipe) -> dict:
    """Runs the benchmarks and writes records.jsonl, report.json, table.md and the plots into the run's eval folder."""
    benchmarks = {name: load_prompts(name, config, recipe) for name, config in recipe.eval.benchmarks.items()}
    target = Target(recipe.target, recipe.eval.dtype)
    drafts = load_drafts(recipe, target)
    facts = {
        name: {
            "kind": recipe.draft[name].kind,
            "parameters": parameter_count(draft),
            "weights_sha256": sha256(recipe.draft_dir(name) / checkpoint.WEIGHTS),
            "tree": recipe.draft[name].tree.model_dump(mode="json"),
            "training": checkpoint.read_config(recipe.draft_dir(name)).training,
        }
        for name, draft in drafts.items()
    }
    if recipe.eval.pack_linears:
        pack(target, drafts)
    bench = Bench(recipe, target, drafts)
    bench.run(benchmarks)
    folder = recipe.eval_dir
    write_text(folder / "records.jsonl", "".join(f"{json.dumps(asdict(record))}\n" for record in bench.records))
    entries = report.results(bench)
    metrics = {name: recipe.draft_dir(name) / "metrics.jsonl" for name in drafts}
    hybrid = {name: config.tree.depth for name, config in recipe.draft.items() if config.tree.hybrid}
    drawn = plots.draw(entries, hybrid, metrics, folder)
    measured = {
        "name": recipe.name,
        "provenance": provenance(recipe),
        "definitions": report.explain(),
        "drafts": facts,
        "results": entries,
        "prompts_left_out": bench.left_out,  # too long for the target's positions
        "table": report.table(entries),
        "plots": [path.name for path in drawn],
    }
    write_provenance(folder, recipe)
    write_text(folder / "table.md", measured["table"] + "\n")
    write_json(folder / publish.REPORT, measured)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the release folder to this Hub repository")
    parser.add_argument("--public", action="store_true", help="make a repository that --push creates public")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.push:
        publish.require_repository_name(arguments.push)
    path = recipe.eval_dir / publish.REPORT
    measured = read_json(path) if measured_already(recipe, path) else measure(recipe)
    print(measured["table"])
    release = publish.build_release(recipe)
    print(f"release: {release}/")
    for plot in measured["plots"]:
        print(f"plot: {release / plot}")
    if arguments.push:
        print(f"uploaded: {publish.push(release, arguments.push, private=not arguments.public)}")


if __name__ == "__main__":
    entry.run(main)
