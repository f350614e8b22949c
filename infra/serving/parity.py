"""Whether engines serve what we measure: the same tokens, and as many guesses accepted, prompt by prompt.

    make serve-test            (python -m infra.serving.parity ENGINES, a folder that the Makefile fills)

The embedded target and the drafts of infra/recipes/serve.toml go to llama.cpp and vLLM in float32. They answer 20
prompts greedily with chains of 3 guesses, and so does our decoding. So do tiny targets with scaled RoPE
(infra/serving/tiny.py), behind prompts of up to 1,500 tokens. A row of the table is a draft in an engine. Its exit
status is 1 where a token or a count differs.
"""

import argparse
import shutil
from pathlib import Path

from infra.serving.engines import Engine, LlamaCpp, Served, Vllm
from infra.serving.tiny import DRAFT, ROPES, tiny
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE as RECIPE_FILE
from pipeline.artifacts.provenance import hardware
from pipeline.basics.embedded import human_eval_prompts
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, write_json
from pipeline.decoding.config import chain
from pipeline.decoding.generate import Generation, Sampling, plain, speculative
from pipeline.decoding.method import LoadedMethod, Method
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import Target, fingerprint, load_tokenizer, source
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.serving.export import export

SERVE = ROOT / "infra/recipes/serve.toml"
CHAIN, TOKENS, PROMPTS = 3, 40, 20
# Engines run a forward for every guess, also where a draft of ours would give two levels by one.
CHAIN_TREE = chain(CHAIN, parallel=1)
HEADS = ["engine", "draft", "same tokens: plain, chain", "same counts", "tau: ours, served"]
HEADS += ["tokens/s: ours plain, served plain, served chain"]


class Ours:
    """Our own answers, by plain decoding and by each draft's chain."""

    def __init__(self, recipe: Recipe, prompts: list[list[int]]):
        self.target, self.fingerprint = Target(recipe.target, "float32"), fingerprint(recipe.target)
        self.sampling, self.prompts = Sampling(TOKENS, frozenset(self.target.stop_ids())), prompts
        self.plainly = [plain(self.target, ids, self.sampling) for ids in self.prompts]

    def chains(self, release: Path) -> list[Generation]:
        """Raises PipelineError where one is not plain decoding's."""
        draft = checkpoint.load(release, self.fingerprint).to(self.target.device, self.target.dtype)
        draft.bind(self.target.embed_head(self.fingerprint))
        found = [speculative(self.target, LoadedMethod(draft, CHAIN_TREE), ids, self.sampling) for ids in self.prompts]
        if [one.tokens for one in found] != [one.tokens for one in self.plainly]:
            raise PipelineError(f"our own chain of {release.name} does not answer as plain decoding does")
        return found


def _questions(recipe: Recipe) -> list[list[int]]:
    texts, tokenizer = [item["turns"][0] for item in human_eval_prompts()[:PROMPTS]], load_tokenizer(recipe.target)
    return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def released(recipe: Recipe, name: str, folder: Path) -> Path:
    """The trained draft as a release has it, without figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = recipe.draft_dir(name)
    checkpoint.export(own, folder, Method(draft=name, tree=CHAIN_TREE), {}, own / RECIPE_FILE)
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
    releases = {name: released(recipe, name, work / f"{name}{of}") for name in drafts}
    exported = {name: work / f"{name}{of}-vllm" for name in releases}
    for name, folder in exported.items():
        shutil.rmtree(folder, ignore_errors=True)
        export(releases[name], "vllm", folder)
    ours = Ours(recipe, prompts)
    mine = {name: ours.chains(release) for name, release in releases.items()}
    for engine in engines:
        with engine.serve(model, None, CHAIN) as address:
            plainly = [engine.ask(address, model, ids, TOKENS) for ids in ours.prompts]
        for name in (name for name in releases if recipe.draft[name].kind in engine.takes):
            with engine.serve(model, exported[name], CHAIN) as address:
                chains = [engine.ask(address, model, ids, TOKENS) for ids in ours.prompts]
            rows.append(row(engine, f"{name}{of}", (ours.plainly, mine[name]), (plainly, chains)))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path, help="each engine's own folder lies there")
    folder = parser.parse_args().engines.resolve()
    recipe = load_recipe(str(SERVE), [])
    work = (recipe.run_dir / "served").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    engines: list[Engine] = [LlamaCpp(folder, work), Vllm(folder, work)]
    rows = compare(recipe, recipe.trained, _questions(recipe), engines, work)
    for kind in ROPES:
        other, prompts = tiny(SERVE, kind, TOKENS, work)
        rows += compare(other, [DRAFT], prompts, engines, work, of=f"-{kind}")
    write_json(recipe.run_dir / "parity.json", {"rows": rows, "table": table(rows)})
    print(table(rows))
    wrong = [one for one in rows if not one["same_plain"] == one["same_chain"] == one["same_counts"] == one["prompts"]]
    if wrong:
        raise PipelineError(f"{len(wrong)} of {len(rows)} do not serve what we measured: see runs/serve/parity.json")


if __name__ == "__main__":
    entry.run(main)
