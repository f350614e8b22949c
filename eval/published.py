"""A published release, measured on this machine as its own recipe measured it: `eval/main.py OWNER/NAME[@REVISION]`.

Guarantee: nothing of the release runs as code, and only the settings of pipeline/recipe/untrusted.py are taken from it;
only `--set target.trust_remote_code=true` trusts its target's code.
"""

import re
from dataclasses import replace
from pathlib import Path

from eval.measure.benchmarks import BENCHMARKS, PREFIX
from eval.release.hub import Repository
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.published import download, download_files, has_own_format
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, write_json
from pipeline.basics.public import public_text
from pipeline.recipe.read import shipped_recipes
from pipeline.recipe.untrusted import ReleasedRecipe, parse_untrusted
from pipeline.serving.load import target_of

ADDRESS = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHIPPED = ("embedded:humaneval",)  # prompts that every machine has
NOT_DUMPED = "none: a published draft is measured, not trained"
DEFAULT_BENCHMARKS = {"humaneval": {"source": "embedded:humaneval", "prompts": 20}}


def write_release_recipe(address: str, overrides: list[str]) -> tuple[Path, list[str]] | None:
    """Write runs/OWNER/NAME/COMMIT/recipe.json for a release of this project, OWNER/NAME[@REVISION]: its target, its
    draft, its methods and those of its benchmarks that need no file of its makers. Return the file, and notes for the
    user; None if `address` is no such address. `overrides` are the user's, which may name the target. Raise
    PipelineError.
    """
    match = ADDRESS.fullmatch(address)
    if match is None or Path(address).exists() or address in shipped_recipes() or address.endswith((".toml", ".json")):
        return None
    repository, revision = match.groups()
    if not revision or not COMMIT.fullmatch(revision):
        revision = Repository(repository, "model", "It is no recipe here, either").commit_of(revision)
    folder = download(repository, revision)
    if not has_own_format(folder) or not (folder / RECIPE).is_file():
        raise PipelineError(
            f"{repository} is no release of this project: name its kind and settings in a recipe as [draft.NAME], and "
            f'set published.NAME = "{repository}@{revision}" (docs/serving.md)'
        )
    download_files(repository, revision, [checkpoint.TEMPLATE])
    path = Path("runs") / repository / revision[:12] / RECIPE
    name = next(
        (value for key, _, value in (override.partition("=") for override in overrides) if key == "target.model"), None
    )
    tree, notes = _build_recipe(folder, repository, revision, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, tree | {"output": str(path.parent)})
    return path, [f"{repository}, revision {revision}: measured as described in {path}", *notes]


def _build_recipe(folder: Path, repository: str, revision: str, model: str | None) -> tuple[dict, list[str]]:
    """Build the recipe, except for its output, from the keys that are taken by name from the release's own recipe
    (untrusted.py). Its training and dump settings are not used. Return it with notes for the user.
    """
    remedy = "Give another revision of the repository"
    saved, raw = checkpoint.read_config(folder), read_sealed(folder / RECIPE, remedy)
    released, target = parse_untrusted(ReleasedRecipe, raw, f"{repository}: {RECIPE}", remedy), target_of(folder, model)
    method = saved.method
    sources = (*SHIPPED, *(PREFIX + name for name in BENCHMARKS))
    public = {name: benchmark for name, benchmark in released.eval.benchmarks.items() if benchmark.source in sources}
    left_out = sorted(released.eval.benchmarks.keys() - public.keys())
    draft_alone = replace(method, secondary=[])
    methods = {method.draft: draft_alone} | ({"-".join(method.sources): method} if method.secondary else {})
    drafts = {method.draft: saved.config, **saved.secondary}
    settings = released.eval.model_dump(mode="json", exclude={"benchmarks"})
    settings |= {
        "benchmarks": {name: benchmark.model_dump() for name, benchmark in public.items()} or DEFAULT_BENCHMARKS,
        "methods": {name: benchmark.to_json() for name, benchmark in methods.items()},
        "tree": method.resolved_tree.to_json(),
    }
    recipe = {
        "name": repository.partition("/")[2],
        "seed": released.seed,
        "target": target.model_dump(mode="json"),
        "data": {"source": NOT_DUMPED},
        "draft": {name: config.to_json() for name, config in drafts.items()},
        "published": {method.draft: f"{repository}@{revision}"},
        "eval": settings,
        "publish": released.publish.model_dump() | {"draft": method.draft},
    }
    notes = [f"not measured, for their prompts are its makers': {', '.join(map(public_text, left_out))}"]
    notes = notes if left_out else []
    return recipe, notes + ([] if public else [f"measured instead: {', '.join(DEFAULT_BENCHMARKS)}"])
