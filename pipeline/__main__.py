"""Run a recipe's stages, or show how far they are.

    python -m pipeline run RECIPE
    python -m pipeline status RECIPE
    python -m pipeline import FOLDER --recipe RECIPE [--draft NAME]    a draft trained elsewhere
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
from pipeline.serving.export import LAUNCH_COMMANDS, export
from pipeline.serving.load import load, locate_release, require_release


def _run(arguments: argparse.Namespace) -> None:
    stages.run(arguments.recipe, arguments.overrides, arguments.until)


def _status(arguments: argparse.Namespace) -> None:
    stages.print_status(arguments.recipe, arguments.overrides, arguments.watch)


def _import(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    name = arguments.draft or recipe.publish.draft
    print("\n".join(import_draft(arguments.folder, recipe, name)))
    print(f"{name}: in {recipe.paths.draft(name)}; measure it with jakiro eval {arguments.recipe}")


def _chat(arguments: argparse.Namespace) -> None:
    folder, recipe = locate_release(arguments.place)
    target, device, trust, adapter = arguments.target, "auto", arguments.trust_remote_code, arguments.adapter
    if recipe is not None:
        target, device = target or recipe.target.model, recipe.target.device
        trust |= recipe.target.trust_remote_code
        adapter = adapter or recipe.target.adapter
    loaded = load(folder, target, device=device, trust_remote_code=trust, adapter=adapter)
    chat(loaded, arguments.tokens, arguments.temperature, arguments.plain)


def _export(arguments: argparse.Namespace) -> None:
    require_release(arguments.release)
    options = arguments.target, arguments.llama_cpp, arguments.prompt_lookup
    print("\n".join(export(arguments.release, arguments.to, arguments.out, *options)))


def _parser() -> argparse.ArgumentParser:
    program = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog="python -m pipeline" if program == "__main__.py" else program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], None], takes_recipe: bool = False):
        subparser = commands.add_parser(name)
        subparser.set_defaults(function=function)
        if takes_recipe:
            add_recipe_arguments(subparser)
        return subparser

    run = command("run", _run, takes_recipe=True)
    run.add_argument("--until", choices=list(stages.STAGES), default="eval", help="the last stage")
    status = command("status", _status, takes_recipe=True)
    status.add_argument("--watch", type=float, nargs="?", const=5.0, metavar="S", help="again every S (5) seconds")
    import_ = command("import", _import)
    import_.add_argument("folder", type=Path, help="a released checkpoint: config.json and its weights")
    import_.add_argument("--recipe", required=True, help="of its target; its draft has the checkpoint's settings")
    import_.add_argument("--draft", help="which of the recipe's; default: publish.draft")
    add_override_argument(import_)
    chat_ = command("chat", _chat)
    chat_.add_argument("place", type=Path, help="a recipe that has run, or its release folder")
    chat_.add_argument("--plain", action="store_true", help="decode every answer without the draft, too")
    chat_.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    chat_.add_argument("--temperature", type=float, default=0.0)
    chat_.add_argument("--target", help="its folder or Hub id, where the release does not name it")
    chat_.add_argument("--adapter", help="a LoRA of peft for the target: a folder, or OWNER/NAME@COMMIT")
    chat_.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    export_ = command("export", _export)
    export_.add_argument("release", type=Path)
    export_.add_argument("--to", required=True, choices=sorted(LAUNCH_COMMANDS))
    export_.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    export_.add_argument("--target", help="for speculators, whose config names it: OWNER/NAME; for gguf: its folder")
    export_.add_argument("--llama-cpp", type=Path, metavar="CHECKOUT", help="for gguf, which its converter writes")
    export_.add_argument("--prompt-lookup", action="store_true", help="in vLLM also copy from the text so far")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    entry.run(main, keeps=sys.argv[1:2] == ["run"])
