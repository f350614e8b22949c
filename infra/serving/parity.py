"""Check that engines serve what we measure: the same tokens, and as many accepted draft tokens, prompt by prompt.

    make serve-test            (python -m infra.serving.parity ENGINES, a folder that the Makefile fills)

llama.cpp and vLLM load the embedded target and the drafts of infra/recipes/serve.toml in float32. They answer 20
prompts greedily with chains of 3 draft tokens, and so does our decoding. The same is done with tiny targets with scaled
RoPE (infra/serving/tiny.py), after prompts of up to 1,500 tokens. A row of the table is a draft in an engine. An
EAGLE-3 draft has one row more: it compares the acceptance estimated in training, along vLLM's answers and from the
states that vLLM captured meanwhile, with what vLLM serves. The exit status is 1 if a token or a count differs.
"""

import argparse
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from infra.serving.engines import EngineAnswer, ExportedDraft, LlamaCpp, ServingEngine, Vllm
from infra.serving.tiny import DRAFTS, make_tiny_target
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE as RECIPE_FILE
from pipeline.artifacts.provenance import hardware
from pipeline.basics.embedded import human_eval_prompts
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, write_json
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig, chain
from pipeline.decoding.contract import Draft
from pipeline.decoding.generate import Generation, Sampling, decode_plain, decode_speculative
from pipeline.decoding.replay import count_acceptance
from pipeline.drafts import DraftConfig, make
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.small_model import SmallLlamaConfig, SmallModel, SmallModelConfig
from pipeline.features.engines import open_source
from pipeline.features.source import GenerationPrompt
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import Target, fingerprint, load_reader, load_tokenizer, locate_target
from pipeline.lm.states import States
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.serving.export import export, vllm_method

SERVE = ROOT / "infra/recipes/serve.toml"
CHAIN, TOKENS, PROMPTS = 3, 40, 20
ESTIMATE = "the estimate along its answers"
COLUMNS = ["engine", "draft", "same tokens: plain, chain", "same counts", "tau: ours, served"]
COLUMNS += ["tokens/s: ours plain, served plain, served chain"]


def chain_tree(config: DraftConfig) -> TreeConfig:
    """Return a chain as engines run it: one forward a draft token, even if our draft gives two levels by one."""
    return chain(CHAIN, parallel=min(config.parallel_choices(CHAIN)))


class LocalDecoding:
    """Answers of our own decoding, plain and with each draft's chain."""

    def __init__(self, recipe: Recipe, prompts: list[list[int]]):
        self.target, self.fingerprint = Target(recipe.target, "float32"), fingerprint(recipe.target)
        self.sampling, self.prompts = Sampling(TOKENS, frozenset(self.target.stop_ids())), prompts
        self.plain_answers = [decode_plain(self.target, ids, self.sampling) for ids in self.prompts]
        self._config = recipe.target

    def method(self, release: Path, exported: Path) -> LoadedMethod:
        draft: Draft
        config, placement = checkpoint.read_config(release).config, (self.target.device, self.target.dtype)
        if isinstance(config, SmallLlamaConfig):  # it reads the full text, like any language model
            self.target.tokenizer.save_pretrained(exported)
            small = SmallModelConfig(model=str(exported))
            draft = make(small, draft_shapes(self.target.config))
            assert isinstance(draft, SmallModel)
            reader_config = self._config.model_copy(update={"model": small.model, "revision": None})
            draft.attach_model(*load_reader(reader_config, *placement), self.target.tokenizer)
        else:
            draft = checkpoint.load(release, self.fingerprint).to(*placement)
            draft.bind(self.target.embed_head(self.fingerprint))
        return LoadedMethod(draft, chain_tree(draft.config))

    def decode_chains(self, method: LoadedMethod) -> list[Generation]:
        """Decode all prompts with the draft's chain. Raise PipelineError if an answer differs from plain decoding's."""
        answers = [decode_speculative(self.target, method, ids, self.sampling) for ids in self.prompts]
        if [answer.tokens for answer in answers] != [answer.tokens for answer in self.plain_answers]:
            raise PipelineError(f"our chain of {method.draft.name} gives other answers than plain decoding")
        return answers

    def estimate(self, method: LoadedMethod, python: str) -> tuple[list[EngineAnswer], list[Generation]]:
        """Return vLLM's answers and, from the states of the same pass, the acceptance estimated in training."""
        layers, options = method.draft.needs.auxiliary, {"enforce_eager": True, "max_model_len": 2048}
        settings = {"engine": "vllm", "engine_python": python, "engine_options": options, "dtype": "float32"}
        vllm, answers, estimates = open_source(self._config.model_copy(update=settings), layers), [], []
        for ids in self.prompts:
            begin = time.perf_counter()
            (answer,) = vllm.answers([GenerationPrompt(ids)], self.sampling, capture=True)
            answers.append(EngineAnswer(answer.tokens, 0, 0, len(answer.tokens) - 1, time.perf_counter() - begin))
            assert isinstance(answer.states_TSD, Tensor)
            states = States(answer.states_TSD[:, 0], answer.states_TSD[:, 1:], layers)
            counts = count_acceptance(method, states, [*ids, *answer.tokens], len(ids))
            estimates.append(Generation(answer.tokens, acceptance=counts, untrimmed_tokens=counts.tokens))
        vllm.close()
        return answers, estimates


def _load_questions(recipe: Recipe) -> list[list[int]]:
    texts, tokenizer = [item["turns"][0] for item in human_eval_prompts()[:PROMPTS]], load_tokenizer(recipe.target)
    return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def make_release(recipe: Recipe, name: str, folder: Path) -> Path:
    """Export the trained draft in the form of a release, without figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trained = recipe.paths.draft(name)
    checkpoint.export(
        trained, folder, Method(draft=name, tree=chain_tree(recipe.draft[name])), {}, trained / RECIPE_FILE
    )
    return folder


def make_row(
    engine: ServingEngine,
    name: str,
    local: tuple[list[Generation], list[Generation]],
    served: tuple[list[EngineAnswer], list[EngineAnswer]],
) -> dict:
    """Compare our answers with an engine's, plain and with the draft's chain, and return the figures."""
    (local_plain, local_chains), (served_plain, served_chains) = local, served
    counts = [engine.counts(answer, CHAIN, TOKENS) for answer in local_chains]
    return {
        "engine": f"{engine.name} ({engine.version})",
        "draft": name,
        "hardware": hardware("cpu"),
        "prompts": len(local_chains),
        "same_plain": sum(a.tokens == b.tokens for a, b in zip(local_plain, served_plain, strict=True)),
        "same_chain": sum(a.tokens == b.tokens for a, b in zip(local_chains, served_chains, strict=True)),
        "same_counts": sum(count == answer.counts for count, answer in zip(counts, served_chains, strict=True)),
        "tau_ours": round(_tau(counts), 4),
        "tau_served": round(_tau([answer.counts for answer in served_chains]), 4),
        "per_second_ours_plain": round(_speed(local_plain), 1),
        "per_second_plain": round(_speed(served_plain), 1),
        "per_second_chain": round(_speed(served_chains), 1),
    }


def _tau(counts: list[tuple[int, int, int]]) -> float:
    return 1 + sum(accepted for *_, accepted in counts) / sum(passes for passes, *_ in counts)


def _speed(answers: list[EngineAnswer] | list[Generation]) -> float:
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(answer.seconds for answer in answers)


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        total = f"of {row['prompts']}"
        equal = [f"{row['same_plain']} {total}, {row['same_chain']} {total}", f"{row['same_counts']} {total}"]
        speeds = f"{row['per_second_ours_plain']}, {row['per_second_plain']}, {row['per_second_chain']}"
        cells.append([row["engine"], row["draft"], *equal, f"{row['tau_ours']:.3f}, {row['tau_served']:.3f}", speeds])
    return markdown.format_table(COLUMNS, cells)


def compare(
    recipe: Recipe,
    drafts: list[str],
    prompts: list[list[int]],
    engines: list[ServingEngine],
    work: Path,
    suffix: str = "",
) -> list[dict]:
    """Compare every draft in every engine that supports it; `suffix` names the target in the row."""
    model, rows = locate_target(recipe.target).name, []
    local, methods, exported, local_chains = LocalDecoding(recipe, prompts), {}, {}, {}
    for name in drafts:
        release, folder = make_release(recipe, name, work / f"{name}{suffix}"), work / f"{name}{suffix}-vllm"
        shutil.rmtree(folder, ignore_errors=True)
        export(release, "vllm", folder, model)
        methods[name], exported[name] = local.method(release, folder), folder
        local_chains[name] = local.decode_chains(methods[name])

    def add(engine: ServingEngine, name: str, *figures: Any) -> None:
        rows.append(make_row(engine, name, *figures))
        print(table(rows[-1:]).splitlines()[-1], flush=True)

    for engine in engines:
        with engine.serve(model) as address:
            served_plain = [engine.ask(address, model, ids, TOKENS) for ids in local.prompts]
        for name in (name for name in drafts if recipe.draft[name].kind in engine.draft_kinds):
            method, folder, served_model = vllm_method(recipe.draft[name]), exported[name], model
            if recipe.draft[name].kind == "mtp":  # the exported folder is the target's
                folder, served_model = None, str(folder)
            with engine.serve(served_model, ExportedDraft(folder, method, CHAIN)) as address:
                served_chains = [engine.ask(address, served_model, ids, TOKENS) for ids in local.prompts]
            add(engine, f"{name}{suffix}", (local.plain_answers, local_chains[name]), (served_plain, served_chains))
            if isinstance(engine, Vllm) and recipe.draft[name].kind == "eagle3":
                answers, estimates = local.estimate(methods[name], engine.python)
                # Tokens that vLLM accepts after an answer's end are in no text.
                trimmed = [replace(answer, accepted=len(answer.tokens) - 1 - answer.passes) for answer in served_chains]
                add(engine, f"{name}{suffix}: {ESTIMATE}", (local.plain_answers, estimates), (answers, trimmed))
    return rows


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
    rows = compare(recipe, recipe.trained, _load_questions(recipe), engines, work)
    for kind, drafts in DRAFTS.items():
        tiny_recipe, prompts = make_tiny_target(SERVE, kind, TOKENS, work)
        rows += compare(tiny_recipe, list(drafts), prompts, engines, work, suffix=f"-{kind}")
    write_json(recipe.paths.run / "parity.json", {"rows": rows, "table": table(rows)})
    print(table(rows))
    mismatches = [
        row for row in rows if not row["same_plain"] == row["same_chain"] == row["same_counts"] == row["prompts"]
    ]
    if mismatches:
        raise PipelineError(
            f"{len(mismatches)} of {len(rows)} rows differ from what we measured: see runs/serve/parity.json"
        )


if __name__ == "__main__":
    entry.run(main)
