"""Runs a recipe's stages as a user would, or says what is done.

    python -m pipeline run RECIPE
    python -m pipeline status RECIPE
    python -m pipeline import FOLDER --recipe RECIPE [--draft NAME]    a draft that others trained
    python -m pipeline chat RECIPE-or-RELEASE [--plain]                talk to the target, with the draft
    python -m pipeline export RELEASE --to ENGINE --out FOLDER         what vLLM, SGLang, speculators, llama.cpp load

Stages are separate processes with their own commands; this file imports none of them and knows their results only by
what they leave on disk. A stage that is done is not started again, so a second `run` continues where the first stopped.
"""

import argparse
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted says nothing

import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.artifacts.imported import import_draft
from pipeline.recipe.load import add_override_argument, add_recipe_arguments, load_recipe
from pipeline.running import entry, stages
from pipeline.serving.chat import chat
from pipeline.serving.export import LAUNCH, export
from pipeline.serving.load import load, require_release


def _run(given: argparse.Namespace) -> None:
    stages.run(given.recipe, given.overrides, given.until)


def _status(given: argparse.Namespace) -> None:
    stages.status(given.recipe, given.overrides, given.watch)


def _import(given: argparse.Namespace) -> None:
    recipe = load_recipe(given.recipe, given.overrides)
    name = given.draft or recipe.publish.draft
    print("\n".join(import_draft(given.folder, recipe, name)))
    print(f"{name}: in {recipe.paths.draft(name)}; measure it with jakiro eval {given.recipe}")


def _chat(given: argparse.Namespace) -> None:
    folder, target, device, trust = given.place, given.target, "auto", given.trust_remote_code
    if not folder.is_dir():
        recipe = load_recipe(str(folder), [])
        folder, target, device = recipe.paths.release, target or recipe.target.model, recipe.target.device
        require_release(folder, str(given.place))
        trust |= recipe.target.trust_remote_code
    loaded = load(folder, target, device=device, trust_remote_code=trust)
    chat(loaded, given.tokens, given.temperature, given.plain)


def _export(given: argparse.Namespace) -> None:
    require_release(given.release)
    print("\n".join(export(given.release, given.to, given.out, given.target, given.llama_cpp)))


def _parser() -> argparse.ArgumentParser:
    started = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog="python -m pipeline" if started == "__main__.py" else started,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, does: Callable[[argparse.Namespace], None], of_recipe: bool = False):
        added = commands.add_parser(name)
        added.set_defaults(does=does)
        if of_recipe:
            add_recipe_arguments(added)
        return added

    run = command("run", _run, of_recipe=True)
    run.add_argument("--until", choices=list(stages.STAGES), default="eval", help="the last stage")
    told = command("status", _status, of_recipe=True)
    told.add_argument("--watch", type=float, nargs="?", const=5.0, metavar="S", help="again every S (5) seconds")
    imported = command("import", _import)
    imported.add_argument("folder", type=Path, help="a released checkpoint: config.json and its weights")
    imported.add_argument("--recipe", required=True, help="of its target; its draft has the checkpoint's settings")
    imported.add_argument("--draft", help="which of the recipe's; default: publish.draft")
    add_override_argument(imported)
    chatting = command("chat", _chat)
    chatting.add_argument("place", type=Path, help="a recipe that has run, or its release folder")
    chatting.add_argument("--plain", action="store_true", help="decode every answer without the draft, too")
    chatting.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    chatting.add_argument("--temperature", type=float, default=0.0)
    chatting.add_argument("--target", help="its folder or Hub id, where the release does not know it")
    chatting.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    exported = command("export", _export)
    exported.add_argument("release", type=Path)
    exported.add_argument("--to", required=True, choices=sorted(LAUNCH))
    exported.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    exported.add_argument("--target", help="for speculators, whose config names it: OWNER/NAME; for gguf: its folder")
    exported.add_argument("--llama-cpp", type=Path, metavar="CHECKOUT", help="for gguf, which its converter writes")
    return parser


def main() -> None:
    given = _parser().parse_args()
    given.does(given)


if __name__ == "__main__":
    entry.run(main, keeps=sys.argv[1:2] == ["run"])
