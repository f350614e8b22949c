"""Where the time of a round goes, on this machine: draft forwards, verification, and everything else.

    python -m eval.bench RECIPE [--draft NAME] [--prompts 8] [--temperature 0]

Decodes held-out or benchmark prompts of the recipe with plain decoding and with every method, in turn, three times, and quotes
transformers' own generate() beside them (it has its own loop and, under eval.pack_linears, the same packed layers). On a GPU the
split waits for the device between the parts of a round, so it is taken in runs of its own. The last line is JSON.
"""

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import torch

from eval.harness import PLAIN, Harness
from eval.report import interval
from eval.units import make_harness, methods_of, units_of
from pipeline import entry
from pipeline.decoding.generate import Generation, Sampling, plain, speculative
from pipeline.errors import PipelineError
from pipeline.recipe import add_recipe_arguments, load_recipe
from pipeline.target import Target


def transformers_seconds(target: Target, ids: list[int], sampling: Sampling) -> tuple[float, int]:
    """Wall-clock time of generate() and its new tokens, the prompt's forward included (it cannot be left out there)."""
    tokens = torch.tensor([ids], device=target.device)
    options = {"do_sample": sampling.temperature > 0, "max_new_tokens": sampling.max_new_tokens, "pad_token_id": 0}
    begin = time.perf_counter()
    out = target.model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return time.perf_counter() - begin, out.shape[1] - len(ids)


def measure(
    harness: Harness, prompts: list[list[int]], sampling: Sampling, repeats: int
) -> dict[str, list[list[Generation]]]:
    """By method, for each prompt one generation a repeat; methods take turns."""
    target, methods = harness.target, harness.methods
    found: dict[str, list[list[Generation]]] = {name: [[] for _ in prompts] for name in (PLAIN, *methods)}
    exact = target.device.type != "cpu"
    for repeat in range(repeats):
        for place, ids in enumerate(prompts):
            seeded = replace(sampling, seed=place + repeat * len(prompts))
            for name in found:
                one = plain(target, ids, seeded) if name == PLAIN else speculative(target, methods[name], ids, seeded)
                if exact and name != PLAIN:  # the split of a second run, which waits between the parts
                    split = speculative(target, methods[name], ids, seeded, exact_split=True)
                    one.split = {key: value * one.seconds / split.seconds for key, value in split.split.items()}
                found[name][place].append(one)
    return found


def figures_of(ours: list[list[Generation]], baseline: list[list[Generation]]) -> dict:
    """Shares of a round's time, forwards a round, tau and speed-up with an interval over prompts."""
    flat = [one for answers in ours for one in answers]
    seconds, passes = sum(one.seconds for one in flat), sum(one.acceptance.passes for one in flat)
    if not passes:
        raise PipelineError("no answer is longer than one token: there is no round to measure")
    shares = {name: sum(one.split.get(name, 0.0) for one in flat) / seconds for name in ("draft", "verify")}

    def per_prompt(groups, what) -> np.ndarray:
        return np.array([sum(what(one) for one in answers) for answers in groups], float)

    def ratio(a, b, c, d, axis=0):
        return (a.sum(axis) / b.sum(axis)) / (c.sum(axis) / d.sum(axis))

    sums = [
        per_prompt(g, what)
        for g in (baseline, ours)
        for what in (lambda one: one.seconds, lambda one: len(one.tokens) - 1)
    ]
    by_repeat = []
    for repeat in range(len(ours[0])):
        one = [
            per_prompt([[a[repeat]] for a in g], w)
            for g in (baseline, ours)
            for w in (lambda x: x.seconds, lambda x: len(x.tokens) - 1)
        ]
        by_repeat.append(round(float(ratio(*one)), 4))
    return {
        "tau": round(sum(one.acceptance.tokens for one in flat) / passes, 4),
        "speedup": round(float(ratio(*sums)), 4),
        "speedup_interval": interval(ratio, *sums),
        "speedup_by_repeat": by_repeat,
        "draft_share": round(shares["draft"], 4),
        "verify_share": round(shares["verify"], 4),
        "bookkeeping_share": round(1 - shares["draft"] - shares["verify"], 4),
        "round_ms": round(1e3 * seconds / passes, 3),
        "draft_forwards_a_round": round(sum(one.draft_forwards for one in flat) / passes, 3),
        "ms_per_token": round(1e3 * sums[2].sum() / sums[3].sum(), 3),
        "plain_ms_per_token": round(1e3 * sums[0].sum() / sums[1].sum(), 3),
        "answers_equal_plain": sum(
            a.tokens == b.tokens for x, y in zip(ours, baseline, strict=True) for a, b in zip(x, y, strict=True)
        ),
        "answers": len(flat),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="only the methods of this draft")
    parser.add_argument("--prompts", type=int, default=8, help="so many, taken from the benchmarks in turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    methods = {name: m for name, m in methods_of(recipe).items() if arguments.draft in (None, m.draft)}
    if not methods:
        raise PipelineError(f"--draft {arguments.draft}: the recipe has {', '.join(sorted(recipe.draft))}")
    harness = make_harness(recipe, methods)
    by_benchmark: dict[str, list] = {}
    for unit in units_of(recipe):
        if unit.temperature == recipe.eval.temperatures[0]:
            by_benchmark.setdefault(unit.benchmark, []).append(unit)
    in_turn = [unit for row in zip(*by_benchmark.values(), strict=False) for unit in row][: arguments.prompts]
    encoded = [turns[0] for turns in map(harness.with_histories, (unit.prompt for unit in in_turn)) if turns]
    sampling = replace(harness.sampling(arguments.temperature, "bench"), temperature=arguments.temperature)
    measure(harness, encoded[:1], sampling, 2)  # warm-up
    found = measure(harness, encoded, sampling, arguments.repeats)
    theirs = [transformers_seconds(harness.target, ids, sampling) for ids in encoded]
    out = {
        "dtype": recipe.eval.dtype,
        "packed": recipe.eval.pack_linears,
        "temperature": arguments.temperature,
        "methods": {},
    }
    out["transformers_ms_per_token"] = round(1e3 * sum(t for t, _ in theirs) / sum(n for _, n in theirs), 3)
    for name in methods:
        one = figures_of(found[name], found[PLAIN])
        out["methods"][name] = one
        low, high = one["speedup_interval"] or (one["speedup"],) * 2
        print(
            f"{name:<20} round {one['round_ms']:7.2f} ms: draft {one['draft_share']:6.1%} ({one['draft_forwards_a_round']:.1f} forwards), "
            f"verify {one['verify_share']:6.1%} (1 forward), bookkeeping {one['bookkeeping_share']:5.1%}; tau {one['tau']:.2f}, "
            f"{one['ms_per_token']:.1f} ms a token, plain {one['plain_ms_per_token']:.1f}: {one['speedup']:.2f}x [{low:.2f}, {high:.2f}], "
            f"by repeat {', '.join(f'{x:.2f}' for x in one['speedup_by_repeat'])}; {one['answers_equal_plain']} of {one['answers']} answers equal plain's"
        )
    print(f"transformers' generate(): {out['transformers_ms_per_token']:.1f} ms a token, the prompt's forward included")
    first = out["methods"][next(iter(methods))]
    keys = ("bookkeeping_share", "draft_share", "verify_share", "speedup", "tau")
    print(json.dumps({**{key: first[key] for key in keys}, **out}))


if __name__ == "__main__":
    entry.run(main)
