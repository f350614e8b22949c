"""Draft models that make your LLM faster: the command `jakiro`, and `jakiro.load` of a release.

A wheel holds the project's folders next to this file, so that site-packages gets one name, not `train` or `eval`. They
import each other by absolute names (`from pipeline.basics import ...`), in a wheel and in a checkout: this package adds
their parent folder to the path. Each command of `jakiro` is a module in them, which also runs without this package.
"""

import runpy
import signal
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).resolve().parent
HOME = _PACKAGE if (_PACKAGE / "pipeline").is_dir() else _PACKAGE.parents[2]  # in a wheel; in a checkout
if str(HOME) not in sys.path:
    sys.path.append(str(HOME))


class Command(NamedTuple):
    module: str  # started as with python -m
    summary: str
    takes_recipe: bool = False  # its first argument is a recipe


COMMANDS = {
    "doctor": Command(
        "jakiro.doctor", "check that this machine is ready: packages, GPUs, engines, ports, limits, disk"
    ),
    "recipes": Command("jakiro.recipes", "list the recipes that come with the project; all commands take their names"),
    "new": Command("jakiro.new", "write a commented recipe for your target, your data and this machine's GPUs"),
    "plan": Command("infra.plan", "estimate what a run will take: tokens, disk, time, memory and GPUs", True),
    "run": Command(
        "jakiro.run", "run all stages: dump, train, measure, release; here or on Ray; run it again to resume", True
    ),
    "status": Command("pipeline", "show which stages of a run are done", True),
    "metrics": Command("jakiro.metrics", "serve a run's progress to Prometheus", True),
    "manifests": Command("jakiro.manifests", "write a run as files for Kubernetes, Slurm, Docker or SkyPilot", True),
    "merge": Command("preprocess.merge", "write a target with its adapter merged, for an engine", True),
    "dump": Command("preprocess.dump_features", "write the target's hidden states into shards", True),
    "feed": Command("preprocess.feed", "compute states for a training while it runs", True),
    "regenerate": Command("preprocess.regenerate", "let the target answer your data's questions", True),
    "verify": Command("preprocess.verify", "check that features can be trusted"),
    "train": Command("jakiro.launch", "train the drafts, on this machine's GPUs", True),
    "rank": Command("train.main", "run one rank of a training, for a launcher: torchrun --no_python jakiro rank"),
    "tune": Command("eval.tune", "find the tree that is fastest on this machine", True),
    "eval": Command("eval.main", "measure acceptance length and speed-up; write report and release"),
    "results": Command("eval.results", "compare runs in one table: their differences, the best learning rate"),
    "push": Command("jakiro.push", "upload a run's release to the Hub", True),
    "chat": Command("pipeline", "talk to the target, with the draft"),
    "import": Command("pipeline", "import a draft that others trained"),
    "export": Command(
        "pipeline", "write a draft in the format of vLLM, SGLang, speculators, llama.cpp or transformers"
    ),
    "serve": Command("infra.serving.serve", "start vLLM or llama.cpp with the target and a release's draft"),
    "served": Command("eval.served", "measure a running server: tau by its own counts, tokens/s", True),
    "serve-test": Command("infra.serving.parity", "check that llama.cpp and vLLM serve what we measure"),
    "check": Command("infra.check", "measure what this GPU (or CPU) does with this project, within ten minutes"),
}


def load(release: str | Path, target: str | None = None, **options: Any) -> Any:
    """Load a release with its target; `pipeline.serving.load.load` documents arguments and result."""
    spec = find_spec("pipeline")
    if spec is None or not str(spec.origin).startswith(str(HOME)):
        raise ImportError(
            f"a module `pipeline` of yours ({spec and spec.origin}) hides the one of jakiro: rename yours"
        )
    from pipeline.serving.load import load as load_release

    return load_release(Path(release), target, **options)


def start_command(name: str, arguments: list[str]) -> None:
    """Run a command in this process, as if its module were started with these arguments. "run here" is the pipeline's
    own `run`, on this machine.
    """
    name, local = name.removesuffix(" here"), name.endswith(" here")
    module = "pipeline" if local else COMMANDS[name].module
    if Path(sys.path[0]) != HOME:
        sys.path.insert(0, str(HOME))
    sys.argv = ["jakiro", name, *arguments] if module == "pipeline" else [f"jakiro {name}", *arguments]
    runpy.run_module(module, run_name="__main__")


def require_sound_recipe(name: str, arguments: list[str]) -> None:
    """Exit with a message if the command's recipe cannot be read, before the command imports torch."""
    from pipeline.basics.errors import PipelineError
    from pipeline.recipe.read import require_sound
    from pipeline.running import entry

    has_recipe = COMMANDS[name].takes_recipe and arguments and not arguments[0].startswith("-")
    if not has_recipe or {"-h", "--help"} & set(arguments):
        return
    overrides = [value for flag, value in pairwise(arguments) if flag == "--set"]
    overrides += [argument.removeprefix("--set=") for argument in arguments if argument.startswith("--set=")]
    try:
        require_sound(arguments[0], overrides)
    except (PipelineError, OSError) as error:
        sys.exit(entry.report(error))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    first = "jakiro new my.toml --target OWNER/NAME --data FILE, then jakiro plan my.toml and jakiro run my.toml"
    return "\n".join(
        ["usage: jakiro COMMAND ... (jakiro COMMAND --help says more)", "", *lines, "", f"Your own target: {first}."]
    )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import prints nothing
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
    elif name == "--version":
        from importlib.metadata import version

        print(f"jakiro {version('jakiro')}")
    elif name in COMMANDS:
        require_sound_recipe(name, arguments)
        start_command(name, arguments)
    else:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        sys.exit(f"error: jakiro has no command {name!r}: {hint}")
