"""A published release, measured here as its own recipe measured it: `eval/main.py OWNER/NAME[@REVISION]`; and a pull
request that brings its repository what this machine found.

Guarantee: nothing of the release runs as code; only `--set target.trust_remote_code=true` trusts its target's.
"""

import re
from pathlib import Path

from eval.release.card import by_origin
from eval.release.folder import CARD
from eval.release.hub import Repository
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.published import download, fetched, is_ours
from pipeline.artifacts.reports import REPORT, ROWS, measured_rows, read_report
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, write_json
from pipeline.recipe.load import shipped
from pipeline.recipe.recipe import Recipe
from pipeline.serving.load import TEMPLATE, target_of

ADDRESS = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHIPPED = ("embedded:", "benchmark:")  # benchmarks that every machine has, or fetches
DEFAULT = {"humaneval": {"source": "embedded:humaneval", "prompts": 20}}
BEFORE = re.compile(rb"(?m)^(?:`report\.html` shows all this|## Use\b)")  # in a card: where figures end


def recipe_of(address: str) -> tuple[Path, list[str]] | None:
    """Writes runs/OWNER/NAME/COMMIT/recipe.json for a release of ours, OWNER/NAME[@REVISION]: its target, its draft,
    its methods and those of its benchmarks that are no file of its makers. Returns it, and what the user should know;
    None for what is no such address. Raises PipelineError.
    """
    found = ADDRESS.fullmatch(address)
    if found is None or Path(address).exists() or address in shipped() or address.endswith((".toml", ".json")):
        return None
    repository, revision = found.groups()
    if not revision or not COMMIT.fullmatch(revision):
        revision = Repository(repository, "model", "It is no recipe here, either").commit_of(revision)
    folder = download(repository, revision)
    if not is_ours(folder) or not (folder / RECIPE).is_file():
        raise PipelineError(
            f"{repository} is no release of this project: name its kind and settings in a recipe, as [draft.NAME] and "
            "[published.NAME] (docs/measuring.md)"
        )
    fetched(repository, revision, [TEMPLATE])
    path = Path("runs") / repository / revision[:12] / RECIPE
    tree, said = _tree(folder, repository, revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, tree | {"output": str(path.parent)})
    return path, [f"{repository}, revision {revision}: measured as {path} says", *said]


def _tree(folder: Path, repository: str, revision: str) -> tuple[dict, list[str]]:
    """The recipe, but for its output; how training and dumping went does not matter."""
    again = "Give another revision of the repository"
    config, tree = read_sealed(folder / checkpoint.CONFIG, again), read_sealed(folder / RECIPE, again)
    method, secondary = config["method"], config.get("secondary", {})
    draft, measuring = method["draft"], tree["eval"]
    target = target_of(folder, tree["target"]["model"])
    kept = {key: one for key, one in measuring["benchmarks"].items() if one["source"].startswith(SHIPPED)}
    gone = sorted(measuring["benchmarks"].keys() - kept.keys())
    alone = {key: value for key, value in method.items() if key not in ("secondary", "calibration")}
    methods = {draft: alone} | ({"-".join([draft, *secondary]): method} if secondary else {})
    found = {
        "name": repository.partition("/")[2],
        "seed": tree["seed"],
        "target": target.model_dump(mode="json"),
        "data": tree["data"],
        "draft": {draft: checkpoint.read_config(folder).config.to_json(), **secondary},
        "published": {draft: {"repository": repository, "revision": revision}},
        "eval": measuring | {"benchmarks": kept or DEFAULT, "contexts": [], "methods": methods, "tree": method["tree"]},
        "publish": tree["publish"] | {"draft": draft},
    }
    said = [f"not measured, for their prompts are its makers': {', '.join(gone)}"] if gone else []
    return found, said + ([] if kept else [f"measured instead: {', '.join(DEFAULT)}"])


def propose(recipe: Recipe, release: Path) -> str:
    """Opens a pull request in the repository of the measured draft, unless it is open: the rows of this machine beside
    those that are there, and a section of its card. Its address, in words. Raises PipelineError.
    """
    given = recipe.published[recipe.publish.draft]
    rows = measured_rows(recipe.eval_dir, read_report(recipe.eval_dir / REPORT))
    title = f"Figures of {rows[0].origin['hardware']}"
    again = f"The figures stay in {release}: run the same command again, it measures nothing twice"
    there = Repository(given.repository, "model", again)
    theirs = fetched(given.repository, given.revision, [CARD]) / CARD
    card = theirs.read_bytes() if theirs.is_file() else b""
    mine = "\n".join(by_origin([row for row in rows if row.origin.get("draft") == recipe.publish.draft])).encode()
    if mine in card:
        return f"{given.repository} has these figures already"
    if address := there.open_pull_request(title):
        return f"a pull request is open: {address}"
    found = BEFORE.search(card)
    at = found.start() if found else len(card)
    gap = b"" if found or not card else b"\n\n"
    files: dict[str, Path | bytes] = {ROWS: release / ROWS, CARD: card[:at] + gap + mine + b"\n" + card[at:]}
    return f"pull request: {there.commit(title, files, proposed_to=given.revision).pr_url}"
