"""Whether engines serve what we measure: the same tokens, and as many guesses accepted, prompt by prompt.

    make serve-test            (python -m infra.serving.parity ENGINES, a folder that the Makefile fills)

The embedded target and the drafts of infra/recipes/serve.toml go to llama.cpp and vLLM in float32. They answer 20
prompts greedily with chains of 3 guesses, and so does our decoding. So do tiny targets with scaled RoPE
(infra/serving/tiny.py), behind prompts of up to 1,500 tokens. A row of the table is a draft in an engine. An EAGLE-3
draft has one more: what the estimate in training counts along answers of vLLM's, from the states that it captured while
it gave them, against what vLLM serves. Its exit status is 1 where a token or a count differs.
"""

import argparse
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.serving.engines import Drafted, Engine, LlamaCpp, Served, Vllm
from infra.serving.tiny import DRAFTS, tiny
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE as RECIPE_FILE
from pipeline.artifacts.provenance import hardware
from pipeline.basics.embedded import human_eval_prompts
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, write_json
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig, chain
from pipeline.decoding.contract import Draft
from pipeline.decoding.generate import Generation, Sampling, plain, speculative
from pipeline.decoding.replay import counted
from pipeline.drafts import DraftConfig, make
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.small_model import SmallLlamaConfig, SmallModel, SmallModelConfig
from pipeline.features.engines import open_source
from pipeline.features.source import Prompt
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import Target, fingerprint, load_reader, load_tokenizer, source
from pipeline.lm.states import States
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.serving.export import export, method_of

SERVE = ROOT / "infra/recipes/serve.toml"
CHAIN, TOKENS, PROMPTS = 3, 40, 20
ESTIMATE = "the estimate along its answers"
HEADS = ["engine", "draft", "same tokens: plain, chain", "same counts", "tau: ours, served"]
HEADS += ["tokens/s: ours plain, served plain, served chain"]


def tree_of(config: DraftConfig) -> TreeConfig:
    """Engines run a forward for every guess, also where a draft of ours could give two levels by one."""
    return chain(CHAIN, parallel=min(config.parallels(CHAIN)))


class Ours:
    """Our own answers, by plain decoding and by each draft's chain."""

    def __init__(self, recipe: Recipe, prompts: list[list[int]]):
        self.target, self.fingerprint = Target(recipe.target, "float32"), fingerprint(recipe.target)
        self.sampling, self.prompts = Sampling(TOKENS, frozenset(self.target.stop_ids())), prompts
        self.plainly = [plain(self.target, ids, self.sampling) for ids in self.prompts]
        self._config = recipe.target

    def method(self, release: Path, exported: Path) -> LoadedMethod:
        draft: Draft
        config, to = checkpoint.read_config(release).config, (self.target.device, self.target.dtype)
        if isinstance(config, SmallLlamaConfig):  # of the whole text, as any language model reads it
            self.target.tokenizer.save_pretrained(exported)
            small = SmallModelConfig(model=str(exported))
            draft = make(small, shapes_of(self.target.config))
            assert isinstance(draft, SmallModel)
            its = self._config.model_copy(update={"model": small.model, "revision": None})
            draft.read_by(*load_reader(its, *to), self.target.tokenizer)
        else:
            draft = checkpoint.load(release, self.fingerprint).to(*to)
            draft.bind(self.target.embed_head(self.fingerprint))
        return LoadedMethod(draft, tree_of(draft.config))

    def chains(self, method: LoadedMethod) -> list[Generation]:
        """Raises PipelineError where one is not plain decoding's."""
        found = [speculative(self.target, method, ids, self.sampling) for ids in self.prompts]
        if [one.tokens for one in found] != [one.tokens for one in self.plainly]:
            raise PipelineError(f"our own chain of {method.draft.name} does not answer as plain decoding does")
        return found

    def estimates(self, method: LoadedMethod, python: str) -> tuple[list[Served], list[Generation]]:
        """vLLM's answers, with the states of the same pass; what the estimate in training counts along these."""
        layers, options = method.draft.needs.auxiliary, {"enforce_eager": True, "max_model_len": 2048}
        asked = {"engine": "vllm", "engine_python": python, "engine_options": options, "dtype": "float32"}
        vllm, answers, found = open_source(self._config.model_copy(update=asked), layers), [], []
        for ids in self.prompts:
            begin = time.perf_counter()
            (answer,) = vllm.answers([Prompt(ids)], self.sampling, capture=True)
            answers.append(Served(answer.tokens, 0, 0, len(answer.tokens) - 1, time.perf_counter() - begin))
            assert answer.states_TSD is not None
            states = States(answer.states_TSD[:, 0], answer.states_TSD[:, 1:], layers)
            counts = counted(method, states, [*ids, *answer.tokens], len(ids))
            found.append(Generation(answer.tokens, acceptance=counts, untrimmed_tokens=counts.tokens))
        vllm.close()
        return answers, found


def _questions(recipe: Recipe) -> list[list[int]]:
    texts, tokenizer = [item["turns"][0] for item in human_eval_prompts()[:PROMPTS]], load_tokenizer(recipe.target)
    return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def released(recipe: Recipe, name: str, folder: Path) -> Path:
    """The trained draft as a release has it, without figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = recipe.paths.draft(name)
    checkpoint.export(own, folder, Method(draft=name, tree=tree_of(recipe.draft[name])), {}, own / RECIPE_FILE)
    return folder


def row(
    engine: Engine,
    name: str,
    ours: tuple[list[Generation], list[Generation]],
    served: tuple[list[Served], list[Served]],
) -> dict:
    """Figures of a draft in an engine: of our answers and its, plain and by chain."""
    (plainly, mine), (served_plainly, chains) = ours, served
    counts = [engine.counts(answer, CHAIN, TOKENS) for answer in mine]
    return {
        "engine": f"{engine.name} ({engine.version})",
        "draft": name,
        "hardware": hardware("cpu"),
        "prompts": len(mine),
        "same_plain": sum(a.tokens == b.tokens for a, b in zip(plainly, served_plainly, strict=True)),
        "same_chain": sum(a.tokens == b.tokens for a, b in zip(mine, chains, strict=True)),
        "same_counts": sum(ours == one.counts for ours, one in zip(counts, chains, strict=True)),
        "tau_ours": round(_tau(counts), 4),
        "tau_served": round(_tau([one.counts for one in chains]), 4),
        "per_second_ours_plain": round(_speed(plainly), 1),
        "per_second_plain": round(_speed(served_plainly), 1),
        "per_second_chain": round(_speed(chains), 1),
    }


def _tau(counts: list[tuple[int, int, int]]) -> float:
    return 1 + sum(accepted for *_, accepted in counts) / sum(passes for passes, *_ in counts)


def _speed(found: list[Served] | list[Generation]) -> float:
    return sum(len(one.tokens) - 1 for one in found) / sum(one.seconds for one in found)


def table(rows: list[dict]) -> str:
    cells = []
    for one in rows:
        of = f"of {one['prompts']}"
        same = [f"{one['same_plain']} {of}, {one['same_chain']} {of}", f"{one['same_counts']} {of}"]
        speeds = f"{one['per_second_ours_plain']}, {one['per_second_plain']}, {one['per_second_chain']}"
        cells.append([one["engine"], one["draft"], *same, f"{one['tau_ours']:.3f}, {one['tau_served']:.3f}", speeds])
    return markdown.table(HEADS, cells)


def compare(
    recipe: Recipe, drafts: list[str], prompts: list[list[int]], engines: list[Engine], work: Path, of: str = ""
) -> list[dict]:
    """Every draft in every engine that takes it; `of` names the target in its row."""
    model, rows = source(recipe.target).name, []
    ours, methods, exported, mine = Ours(recipe, prompts), {}, {}, {}
    for name in drafts:
        release, folder = released(recipe, name, work / f"{name}{of}"), work / f"{name}{of}-vllm"
        shutil.rmtree(folder, ignore_errors=True)
        export(release, "vllm", folder)
        methods[name], exported[name] = ours.method(release, folder), folder
        mine[name] = ours.chains(methods[name])

    def add(engine: Engine, name: str, *figures: Any) -> None:
        rows.append(row(engine, name, *figures))
        print(table(rows[-1:]).splitlines()[-1], flush=True)

    for engine in engines:
        with engine.serve(model) as address:
            plainly = [engine.ask(address, model, ids, TOKENS) for ids in ours.prompts]
        for name in (name for name in drafts if recipe.draft[name].kind in engine.takes):
            with engine.serve(model, Drafted(exported[name], method_of(recipe.draft[name]), CHAIN)) as address:
                chains = [engine.ask(address, model, ids, TOKENS) for ids in ours.prompts]
            add(engine, f"{name}{of}", (ours.plainly, mine[name]), (plainly, chains))
            if isinstance(engine, Vllm) and recipe.draft[name].kind == "eagle3":
                answers, found = ours.estimates(methods[name], engine.python)
                # What vLLM accepts behind an answer's end no text shows.
                cut = [replace(one, accepted=len(one.tokens) - 1 - one.passes) for one in chains]
                add(engine, f"{name}{of}: {ESTIMATE}", (ours.plainly, found), (answers, cut))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path, help="each engine's own folder lies there")
    folder = parser.parse_args().engines.resolve()
    recipe = load_recipe(str(SERVE), [])
    work = (recipe.paths.run / "served").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.environ |= Vllm.environment  # for the engine that captures
    engines: list[Engine] = [LlamaCpp(folder, work), Vllm(folder, work)]
    rows = compare(recipe, recipe.trained, _questions(recipe), engines, work)
    for kind, drafts in DRAFTS.items():
        other, prompts = tiny(SERVE, kind, TOKENS, work)
        rows += compare(other, list(drafts), prompts, engines, work, of=f"-{kind}")
    write_json(recipe.paths.run / "parity.json", {"rows": rows, "table": table(rows)})
    print(table(rows))
    wrong = [one for one in rows if not one["same_plain"] == one["same_chain"] == one["same_counts"] == one["prompts"]]
    if wrong:
        raise PipelineError(f"{len(wrong)} of {len(rows)} do not serve what we measured: see runs/serve/parity.json")


if __name__ == "__main__":
    entry.run(main)
