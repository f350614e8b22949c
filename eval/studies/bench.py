"""Where the time of a round goes, on this machine: draft forwards, verification, and everything else.

    python -m eval.studies.bench RECIPE [--draft NAME] [--prompts 8] [--repeats 3] [--temperature 0]

Decodes the recipe's prompts with plain decoding and with every method, taking turns, as eval/main.py does and behind
the same gate: a method that loses something is given no speed. "draft" and "verify" are the models' forwards with their
heads; everything else is bookkeeping: growing the tree, masks and positions, acceptance, cutting the caches. (A draft
forward's own mask counts as draft.) On a GPU the split waits for the device between the parts of a round, so speeds are
a little lower than eval/main.py's.

transformers' own generate(), its prompt lookup and, where it can, an assistant (the first fifth of the target's layers)
run beside them, on the same packed layers under eval.pack_linears, without the prompt's forward, which is timed apart.
The last line is JSON.
"""

import argparse
import json
from itertools import product, zip_longest

import torch

from eval.measure import report
from eval.measure.harness import EvalTask, Harness, pooled
from eval.measure.tasks import make_harness, methods_of, units_of
from pipeline.basics.accelerator import now
from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.lm.model import Target
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry


def chosen_units(recipe: Recipe, count: int) -> list[EvalTask]:
    """The first prompts of the benchmarks in turn, until there are `count`."""
    by_benchmark: dict[str, list[EvalTask]] = {}
    for unit in units_of(recipe):
        by_benchmark.setdefault(unit.benchmark, []).append(unit)
    return [unit for row in zip_longest(*by_benchmark.values()) for unit in row if unit][:count]


def theirs(target: Target) -> dict[str, dict]:
    """transformers' ways of decoding that work with this target, and what generate() is told for each."""
    layers, config = max(1, target.config.num_hidden_layers // 5), target.model.config
    found = {"generate()": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}}
    assistant, before = {"assistant_early_exit": layers}, getattr(config, "num_hidden_layers", None)
    try:  # some decoders cannot leave early, and transformers finds out on the way
        tokens = torch.arange(4, device=target.device)[None]
        target.model.generate(tokens, max_new_tokens=2, pad_token_id=0, **assistant)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        config.num_hidden_layers = before
        return found
    return found | {f"an assistant: the first {layers} layers": assistant}


def generate_times(
    target: Target, prompts: list[list[int]], sampling: Sampling, repeats: int
) -> dict[str, float | None]:
    """Milliseconds a token of transformers' ways, behind the prompt's forward, which is timed in turn with each."""
    options = {
        "do_sample": sampling.temperature > 0,
        "pad_token_id": 0,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p}
    ways = theirs(target)
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for repeat, ids, (name, more) in product(range(repeats + 1), prompts, ways.items()):
        given = torch.tensor([ids], device=target.device)
        mask = torch.ones_like(given)
        times, lengths = [], []
        for limit in (1, sampling.max_new_tokens):
            begin = now(target.device)
            out = target.model.generate(given, attention_mask=mask, max_new_tokens=limit, **options, **more)
            lengths.append(len(out[0].tolist()))  # waits
            times.append(now(target.device) - begin)
        if repeat:  # the first one warms up
            seconds[name] += times[1] - times[0]
            tokens[name] += lengths[1] - lengths[0]
    return {name: round(1e3 * seconds[name] / tokens[name], 3) if tokens[name] else None for name in ways}


def summary(entries: list[dict]) -> dict[str, dict]:
    """By method, over benchmarks: figures are the means of the benchmarks'."""
    found: dict[str, dict] = {}
    for name in dict.fromkeys(one["draft"] for one in entries):
        mine = [one for one in entries if one["draft"] == name]
        passed = all(one["gate"]["passed"] for one in mine)

        def mean(what, mine=mine) -> float:
            return round(sum(what(one) for one in mine) / len(mine), 4)

        found[name] = {"tau": mean(lambda one: one["tau"]), "speedup": None, "gate": passed}
        found[name]["draft_forwards_a_round"] = mean(lambda one: one["draft_forwards_per_pass"])
        if passed:
            found[name] |= {
                "speedup": mean(lambda one: one["speedup"]),
                "ms_per_token": mean(lambda one: one["ms_per_token"]),
                "plain_ms_per_token": mean(lambda one: one["plain_ms_per_token"]),
                **{
                    f"{part}_share": mean(lambda one, part=part: one["time_shares"][part])
                    for part in ("draft", "verify", "bookkeeping")
                },
            }
    return found


def said(entry_: dict) -> str:
    place = f"{entry_['benchmark']:<12} {entry_['draft']:<20} tau {entry_['tau']:.2f}"
    if not entry_["gate"]["passed"]:
        return f"{place}  the losslessness gate failed: speed withheld"
    shares, (low, high) = entry_["time_shares"], entry_["speedup_interval"] or (entry_["speedup"],) * 2
    return (
        f"{place}  round {entry_['tau'] * entry_['ms_per_token']:6.1f} ms: draft {shares['draft']:5.1%} "
        f"({entry_['draft_forwards_per_pass']:.1f} forwards), verify {shares['verify']:5.1%} (1 forward), bookkeeping "
        f"{shares['bookkeeping']:4.1%};  {entry_['ms_per_token']:.1f} ms a token, plain "
        f"{entry_['plain_ms_per_token']:.1f}: {entry_['speedup']:.2f}x [{low:.2f}, {high:.2f}], by repeat "
        + ", ".join(f"{x:.2f}" for x in entry_["speedup_by_repeat"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="only the methods of this draft")
    parser.add_argument("--prompts", type=int, default=8, help="so many, taken from the benchmarks in turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    given = load_recipe(arguments.recipe, arguments.overrides)
    methods = {name: m for name, m in methods_of(given).items() if arguments.draft in (None, m.draft)}
    if not methods:
        raise PipelineError(f"--draft {arguments.draft}: the recipe has {', '.join(sorted(given.draft))}")
    sets = [
        f"eval.temperatures=[{arguments.temperature}]",
        *(f"eval.{key}={arguments.repeats}" for key in ("repeats", "sampled_repeats")),
    ]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *sets])
    harness: Harness = make_harness(recipe, methods, exact_split=True)
    units = chosen_units(recipe, arguments.prompts)
    records, gates, left_out = pooled([(unit.benchmark, harness.decode(unit)) for unit in units])
    entries = report.results(records, gates)
    prompts = [turns[0] for turns in map(harness.with_histories, (unit.prompt for unit in units)) if turns]
    sampling = harness.sampling(arguments.temperature, "bench")
    took = generate_times(harness.target, prompts, sampling, arguments.repeats)
    for one in entries:
        print(said(one))
    ways = ", ".join(f"{name} {ms or float('nan'):.1f}" for name, ms in took.items())
    print(
        f"transformers' own, ms a token: {ways}; {len(prompts)} prompts, {sum(left_out.values())} left out, "
        f"{recipe.eval.dtype}"
    )
    found = summary(entries)
    first = next(iter(found.values()))
    keys = ("bookkeeping_share", "draft_share", "verify_share", "speedup", "tau")
    figures = {
        "methods": found,
        "transformers_ms_per_token": took,
        "prompts": len(prompts),
        "dtype": recipe.eval.dtype,
    }
    figures |= {"packed": recipe.eval.pack_linears, "temperature": arguments.temperature, "results": entries}
    print(json.dumps({**{key: first.get(key) for key in keys}, **figures}))


if __name__ == "__main__":
    entry.run(main)
