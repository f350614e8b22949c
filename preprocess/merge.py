"""Write a target with its adapter merged as a folder of its own, for programs that take no adapter (target.engine =
"vllm", vllm serve).

python -m preprocess.merge RECIPE FOLDER

The folder has the weights, in target.dtype, the tokenizer and the generation settings. It is read again and compared
with the merge in memory, tensor by tensor, before it gets its name. Then set target.model to it, and remove
target.adapter: its dumps and drafts are those of the merged target, under a fingerprint of their own.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from pipeline.basics.errors import PipelineError
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import DTYPES, load_model, load_tokenizer
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.running import entry


def merge_target(config: TargetConfig, folder: Path, dtype: str) -> None:
    """Write the merged target. Raise PipelineError without an adapter, for an existing folder, and where what is read
    back differs.
    """
    if config.adapter is None:
        raise PipelineError("target.adapter is not set: there is nothing to merge")
    if folder.exists():
        raise PipelineError(f"{folder} exists already: remove it, or name another folder")
    model = load_model(config, DTYPES[dtype])
    heads = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if not torch.equal(*heads):
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
        model.save_pretrained(unfinished)
        load_tokenizer(config).save_pretrained(unfinished)
        plain = config.model_copy(update={"model": unfinished, "adapter": None, "revision": None})
        written = load_model(plain, DTYPES[dtype]).state_dict()
        different = [
            name
            for name, tensor in model.state_dict().items()
            if name not in written or not torch.equal(tensor, written[name])
        ]
        if different:
            raise PipelineError(f"{different[0]} was written otherwise than it was merged: try again on another disk")
        Path(unfinished).chmod(0o755)
        Path(unfinished).rename(folder)
        Path(unfinished).mkdir()  # for the context's own removal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("folder", type=Path, help="the folder to write, which does not exist yet")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    merge_target(recipe.target, arguments.folder, recipe.target.dtype)
    print(f"{arguments.folder} is written: set target.model to it, and remove target.adapter")


if __name__ == "__main__":
    entry.run(main)
