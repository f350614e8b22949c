"""Draft models that make your LLM faster: the command `jakiro`, and `jakiro.load` of a release.

A wheel holds the project's folders beside this file, so that site-packages gets one name, not `train` or `eval`. They
name each other from the top (`from pipeline.basics import ...`), in a wheel as in a checkout: this package puts the
place where they lie on the path. Each command of `jakiro` is a file of theirs, which runs without it, too.
"""

import runpy
import signal
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent
HOME = _HERE if (_HERE / "pipeline").is_dir() else _HERE.parents[2]  # a wheel's; a checkout's
if str(HOME) not in sys.path:
    sys.path.append(str(HOME))


class Command(NamedTuple):
    runs: str  # a module, started as with -m
    does: str
    of_recipe: bool = False  # its first argument is one


COMMANDS = {
    "doctor": Command("jakiro.doctor", "whether this machine is ready: packages, GPUs, engines, ports, limits, disk"),
    "recipes": Command("jakiro.recipes", "the recipes that come with the project, by the name that all commands take"),
    "new": Command("jakiro.new", "write a commented recipe for your target, your data and this machine's GPUs"),
    "plan": Command("infra.plan", "what a run will take: tokens, disk, time, memory and GPUs", True),
    "run": Command("jakiro.run", "everything: dump, train, measure, release; here or on Ray; again: goes on", True),
    "status": Command("pipeline", "what of a run is done", True),
    "metrics": Command("jakiro.metrics", "serve what a run records of itself to Prometheus", True),
    "manifests": Command("jakiro.manifests", "a run as files for Kubernetes, Slurm, Docker or SkyPilot", True),
    "dump": Command("preprocess.dump_features", "the target's hidden states into shards", True),
    "feed": Command("preprocess.feed", "beside training: its states while it reads them", True),
    "regenerate": Command("preprocess.regenerate", "the target answers your data's questions anew", True),
    "verify": Command("preprocess.verify", "whether features can be trusted"),
    "train": Command("jakiro.launch", "the drafts, on this machine's GPUs", True),
    "rank": Command("train.main", "one rank of a training, for a launcher: torchrun --no_python jakiro rank"),
    "tune": Command("eval.tune", "the tree that is fastest on this machine", True),
    "eval": Command("eval.main", "acceptance length and speed-up; report and release"),
    "results": Command("eval.results", "runs in one table, their differences, which learning rate was best"),
    "push": Command("jakiro.push", "upload a run's release to the Hub", True),
    "chat": Command("pipeline", "talk to the target, with the draft"),
    "import": Command("pipeline", "a draft that others trained"),
    "export": Command("pipeline", "what vLLM, SGLang, speculators, llama.cpp or transformers load"),
    "served": Command("eval.served", "a running server: tau by its own counts, tokens/s", True),
    "serve-test": Command("infra.serving.parity", "whether llama.cpp and vLLM serve what we measure"),
    "check": Command("infra.check", "what this GPU (or CPU) does with this project, within ten minutes"),
}


def load(release: str | Path, target: str | None = None, **options: Any) -> Any:
    """A release with its target: `pipeline.serving.load.load`, which says what it takes and gives."""
    found = find_spec("pipeline")
    if found is None or not str(found.origin).startswith(str(HOME)):
        raise ImportError(f"a module `pipeline` of yours ({found and found.origin}) hides jakiro's: rename it")
    from pipeline.serving.load import load as load_release

    return load_release(Path(release), target, **options)


def begin(name: str, arguments: list[str]) -> None:
    """Runs a command in this process, as if its file had been started with these arguments. "run here": `run` as the
    pipeline knows it.
    """
    name, here = name.removesuffix(" here"), name.endswith(" here")
    runs = "pipeline" if here else COMMANDS[name].runs
    if Path(sys.path[0]) != HOME:
        sys.path.insert(0, str(HOME))
    sys.argv = ["jakiro", name, *arguments] if runs == "pipeline" else [f"jakiro {name}", *arguments]
    runpy.run_module(runs, run_name="__main__")


def require_sound_recipe(name: str, arguments: list[str]) -> None:
    """Exit with a message where the command's recipe cannot be read, before the command imports torch."""
    from pipeline.basics.errors import PipelineError
    from pipeline.recipe.read import require_sound
    from pipeline.running import entry

    known = COMMANDS[name].of_recipe and arguments and not arguments[0].startswith("-")
    if not known or {"-h", "--help"} & set(arguments):
        return
    overrides = [value for flag, value in pairwise(arguments) if flag == "--set"]
    overrides += [one.removeprefix("--set=") for one in arguments if one.startswith("--set=")]
    try:
        require_sound(arguments[0], overrides)
    except (PipelineError, OSError) as error:
        sys.exit(entry.report(error))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.does}" for name, command in COMMANDS.items()]
    first = "jakiro new my.toml --target OWNER/NAME --data FILE, then jakiro plan my.toml and jakiro run my.toml"
    return "\n".join(
        ["usage: jakiro COMMAND ... (jakiro COMMAND --help says more)", "", *lines, "", f"Your own target: {first}."]
    )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted says nothing
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
    elif name == "--version":
        from importlib.metadata import version

        print(f"jakiro {version('jakiro')}")
    elif name in COMMANDS:
        require_sound_recipe(name, arguments)
        begin(name, arguments)
    else:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        sys.exit(f"error: jakiro has no command {name!r}: {meant}")
