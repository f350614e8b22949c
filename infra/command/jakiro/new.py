"""Write a commented recipe for your target, based on its config, your data and this machine's GPUs.

    jakiro new my.toml --target meta-llama/Llama-3.1-8B-Instruct --data /data/sharegpt.json --license llama3.1
    jakiro new my.toml --target ./model --data hf://datasets/OWNER/NAME/file.json --draft eagle3 --license apache-2.0
    jakiro new my.toml --target Qwen/Qwen3-8B --draft dflash --preset paper --license apache-2.0

`--preset paper` writes the hyper-parameters of the draft's paper (infra/templates/presets.toml), `laptop` those of a
quarter of an hour on a CPU. Sizes follow from the number of records, of which at most 20,000 are counted. No weights
are read. The recipe's cost: `jakiro plan my.toml`.
"""

import argparse
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from jakiro.presets import NAMES, load_presets
from pipeline.basics.errors import PipelineError
from pipeline.recipe.license import License
from pipeline.running import entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the recipe to write; the file must not exist yet")
    parser.add_argument("--target", required=True, help="OWNER/NAME on the Hub, or a folder")
    data = "conversations or messages: a path, hf://, s3://, datasets:NAME; default: the papers' ShareGPT"
    parser.add_argument("--data", help=data)
    parser.add_argument("--subset", help="of a data set on the Hub with several subsets")
    parser.add_argument("--split", help="of a data set; default: train")
    drafts = f"{', '.join(load_presets())}; default: %(default)s"
    parser.add_argument("--draft", default="eagle3", choices=load_presets(), metavar="NAME", help=drafts)
    parser.add_argument("--preset", choices=NAMES, help="default: paper with a GPU, else laptop")
    parser.add_argument("--license", required=True, help="of the draft, as the Hub spells it: apache-2.0, ...")
    args = parser.parse_args()
    if args.out.exists():
        raise PipelineError(f"{args.out} is there already: give another name, or remove it")
    try:
        TypeAdapter(License).validate_python(args.license)
    except ValidationError as error:
        raise PipelineError(f"--license {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    from jakiro.first_recipe import write_recipe  # imports torch, which takes seconds: errors above come at once

    print("\n".join(write_recipe(args)))


if __name__ == "__main__":
    entry.run(main)
