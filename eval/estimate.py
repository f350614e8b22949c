"""About what measuring a recipe's drafts will take, before it is started.

python -m eval.estimate RECIPE [--ms-per-token R]

hours     answers x max_new_tokens x milliseconds of a plain token, as if no draft gained anything and no answer ended
early, which
          makes up for what is not in it: prompts' forwards, warm-ups, the gates' enumerations, loading
memory    the target's weights, a cache of one answer, the drafts
"""

import argparse
import json

import torch

from eval.measure.packed import pack
from eval.measure.prompts import HELDOUT, load_prompts
from pipeline.basics.accelerator import now
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.lm.model import DTYPES, Target, load_config, parameter_count_of
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry

CONTEXT = 256  # tokens before those that are timed


def measured_token(recipe: Recipe, tokens: int = 48) -> float:
    """Seconds of one plain token of the target, as evaluation runs it."""
    target = Target(recipe.target, recipe.eval.dtype)
    if recipe.eval.pack_linears:
        pack(target, {})
    cache = target.new_cache(CONTEXT + tokens + 4)
    target.forward(torch.zeros(CONTEXT, dtype=torch.long, device=target.device), cache)
    begin = 0.0
    for step in range(tokens + 4):
        if step == 4:
            begin = now(target.device)
        hidden_ND = target.forward(torch.ones(1, dtype=torch.long, device=target.device), cache).final_ND
        int(target.head(hidden_ND[-1]).argmax())  # waits
    return (now(target.device) - begin) / tokens


def turns(recipe: Recipe, name: str) -> int:
    """A benchmark's questions; of held-out dialogues that are not dumped yet, as many as the dump will keep."""
    config = recipe.eval.benchmarks[name]
    if config.source == HELDOUT:
        return config.prompts or recipe.data.heldout_prompts
    return sum(len(prompt.turns) for prompt in load_prompts(name, config, recipe))


def answers(recipe: Recipe) -> int:
    """Of all methods, benchmarks and temperatures."""
    config = recipe.eval
    repeats = sum(config.sampled_repeats if t > 0 else config.repeats for t in config.temperatures)
    return sum(turns(recipe, name) for name in config.benchmarks) * repeats * (1 + len(recipe.methods))


def memory_bytes(recipe: Recipe) -> float:
    shapes, size = shapes_of(load_config(recipe.target)), DTYPES[recipe.eval.dtype].itemsize
    layers = load_config(recipe.target).num_hidden_layers
    length = recipe.data.max_length + recipe.eval.max_new_tokens
    cache = 2 * layers * shapes["num_key_value_heads"] * shapes["head_dim"] * length
    with torch.device("meta"):
        drafts = sum(parameter_count(build(recipe.draft[name], shapes)) for name in recipe.trained)
    drafts += sum(map(parameter_count_of, recipe.small_models.values()))
    packed = (
        2 if recipe.eval.pack_linears else 1
    )  # beside the packed weights the plain ones live until they are replaced
    return (parameter_count_of(recipe.target) * packed + cache + drafts) * size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--ms-per-token", type=float, help="of plain decoding, where it is known")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    seconds = arguments.ms_per_token / 1000 if arguments.ms_per_token else measured_token(recipe)
    count = answers(recipe)
    hours = count * recipe.eval.max_new_tokens * seconds / 3600
    memory = memory_bytes(recipe)
    print(
        f"eval   {count:,} answers of up to {recipe.eval.max_new_tokens} tokens: about {hours:,.2f} h at "
        f"{seconds * 1000:,.1f} ms a token, {memory / 1e9:,.1f} GB"
    )
    print(
        json.dumps(
            {
                "answers": count,
                "hours": round(hours, 6),
                "ms_per_token": round(seconds * 1000, 2),
                "memory_bytes": round(memory),
            }
        )
    )


if __name__ == "__main__":
    entry.run(main)
