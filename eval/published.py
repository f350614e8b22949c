"""A published release, measured here as its own recipe measured it: `eval/main.py OWNER/NAME[@REVISION]`; and a pull
request that brings its repository what this machine found.
"""

import re
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

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

ADDRESS = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHIPPED = ("embedded:", "benchmark:")  # benchmarks that every machine has, or fetches
DEFAULT = {"humaneval": {"source": "embedded:humaneval", "prompts": 20}}
ABOVE = ("`report.html` shows all this", "## Use")  # in a card: the first of them that is there


def recipe_of(address: str) -> tuple[Path, list[str]] | None:
    """Writes runs/OWNER/NAME/recipe.json for a release of ours, OWNER/NAME[@REVISION]: its target, its draft, its methods and
    those of its benchmarks that are no file of its makers. Returns it, and what the user should know; None for what is
    no such address. Raises PipelineError.
    """
    found = ADDRESS.fullmatch(address)
    if found is None or Path(address).exists() or address in shipped() or address.endswith((".toml", ".json")):
        return None
    repository, revision = found[1], _commit(found[1], found[2])
    folder = download(repository, revision)
    if not is_ours(folder) or not (folder / RECIPE).is_file():
        raise PipelineError(
            f"{repository} is no release of this project: name its kind and settings in a recipe, as [draft.NAME] and "
            "[published.NAME] (docs/measuring.md)"
        )
    again = "Give another revision of the repository"
    config, tree = read_sealed(folder / checkpoint.CONFIG, again), read_sealed(folder / RECIPE, again)
    method, secondary = config["method"], config.get("secondary", {})
    draft = method["draft"]
    tree |= {"name": repository.partition("/")[2], "output": f"runs/{repository}"}
    tree["draft"] = {draft: checkpoint.read_config(folder).config.to_json(), **secondary}
    tree["published"] = {draft: {"repository": repository, "revision": revision}}
    tree["publish"] |= {"draft": draft}
    tree["features"] |= {"store": None}
    kept = {key: one for key, one in tree["eval"]["benchmarks"].items() if one["source"].startswith(SHIPPED)}
    gone = sorted(tree["eval"]["benchmarks"].keys() - kept.keys())
    alone = {key: value for key, value in method.items() if key not in ("secondary", "calibration")}
    methods = {draft: alone} | ({"-".join([draft, *secondary]): method} if secondary else {})
    tree["eval"] |= {"benchmarks": kept or DEFAULT, "contexts": [], "methods": methods, "tree": method["tree"]}
    path = Path(tree["output"]) / RECIPE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, tree)
    said = [f"{repository}, revision {revision}: measured as {path} says"]
    if gone:
        said.append(f"not measured, for their prompts are its makers': {', '.join(gone)}")
    if not kept:
        said.append(f"measured instead: {', '.join(DEFAULT)}")
    return path, said


def _commit(repository: str, revision: str | None) -> str:
    if revision and COMMIT.fullmatch(revision):
        return revision
    try:
        return str(HfApi().model_info(repository, revision=revision).sha)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PipelineError(
            f"{repository}{f', revision {revision}' if revision else ''}: neither a recipe here nor a model that the "
            f"Hub shows: {' '.join(str(error).split())[:300]}"
        ) from None


def propose(recipe: Recipe, release: Path) -> str:
    """Opens a pull request in the repository of the measured draft: the rows of this machine beside those that are
    there, and a section of its card. Its address. Raises PipelineError.
    """
    given = recipe.published[recipe.publish.draft]
    rows = measured_rows(recipe.eval_dir, read_report(recipe.eval_dir / REPORT))
    theirs = fetched(given.repository, given.revision, [CARD]) / CARD
    card = theirs.read_text(encoding="utf-8") if theirs.is_file() else ""
    mine = "\n".join(by_origin([row for row in rows if row.origin.get("draft") == recipe.publish.draft]))
    at = next((found for text in ABOVE if (found := card.find(text)) >= 0), len(card))
    files = {ROWS: release / ROWS, CARD: f"{card[:at]}{mine}\n{card[at:]}".encode()}
    again = f"The figures stay in {release}: run the same command again, it measures nothing twice"
    there = Repository(given.repository, "model", again)
    found = there.commit(f"Figures of {rows[0].origin['hardware']}", files, pull_request=True)
    return f"pull request: {found.pr_url}"
