"""The release as transformers alone runs it, beside transformers' own ways of decoding: `make one-line`.

    python -m infra.serving.in_transformers RECIPE PYTHON [--tokens 64]

PYTHON is an environment's that holds torch, transformers and safetensors; infra/serving/one_line.py runs there, with
the recipe's release, target and benchmarks. Prints a table, and writes it to ``one_line.json`` in the run's eval
folder.
"""

import argparse
import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from eval.measure.tasks import tasks_of
from infra.serving import one_line
from pipeline.artifacts.provenance import provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import load_tokenizer, source
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown


def prompts(recipe: Recipe) -> list[list[int]]:
    """The benchmarks' first turns, as token ids."""
    tokenizer = load_tokenizer(recipe.target)
    texts = dict.fromkeys(task.prompt.turns[0] for task in tasks_of(recipe))
    return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def table(found: dict) -> str:
    """As Markdown."""
    base = found["seconds"][one_line.PLAIN]
    heads = ["", "the same tokens as plain `generate()`", "seconds", "speed-up"]
    rows = (
        [way, f"{found['same'][way]} of {found['prompts']}", f"{seconds:.1f}", f"{base / seconds:.2f}x"]
        for way, seconds in found["seconds"].items()
    )
    return markdown.table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("python", type=Path, help="the environment's program")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if not recipe.release_dir.is_dir():
        raise PipelineError(f"{recipe.release_dir} is missing: run python eval/main.py {arguments.recipe} first")
    with TemporaryDirectory() as folder:
        given = Path(folder) / "prompts.json"
        given.write_text(json.dumps(prompts(recipe)))
        command = [str(arguments.python.absolute()), one_line.__file__, str(recipe.release_dir.resolve())]
        command += [source(recipe.target).name, str(given), "--tokens", str(arguments.tokens)]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PipelineError(f"{arguments.python} {one_line.__file__} failed with status {done.returncode}: see above")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["installed"]:
        raise PipelineError(f"{arguments.python} also holds {', '.join(found['installed'])}: make an environment anew")
    found |= {"provenance": provenance(recipe), "table": table(found)}
    write_json(recipe.eval_dir / "one_line.json", found)
    print(found["table"])
    if set(found["same"].values()) != {found["prompts"]}:
        raise PipelineError("the answers are not plain generate()'s")


if __name__ == "__main__":
    entry.run(main)
