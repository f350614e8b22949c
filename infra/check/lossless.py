"""The part of `infra.check` that decodes: the harness's own gate on a small random target, with drafts that know its
answers.
"""

from typing import Any

import torch

from eval.measure import report
from eval.measure.harness import EvalTask, Harness, pooled
from eval.measure.prompts import Prompt
from infra.check.shapes import Given, new_methods, save_small_target
from pipeline.artifacts import reports
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.generate import Sampling, plain
from pipeline.drafts import TrainedDraft, objective_of
from pipeline.features.batch import collate
from pipeline.features.schema import Row
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import Target
from pipeline.recipe.recipe import Recipe

TEACHING = 150  # steps that teach a draft the small target's answers, so that candidates are accepted


def lossless(given: Given) -> dict[str, Any]:
    """The harness's own gate on a small target: both dtypes, eager and compiled, at both temperatures."""
    folder = given.folder / "small"
    save_small_target(folder, given.shape.small)
    sets = ["eval.temperatures=[0.0, 1.0]", f"eval.max_new_tokens={given.shape.answer}"]
    sets += ["eval.repeats=1"]
    recipe = given.recipe_of(folder, *sets)
    taught: dict[str, dict[str, torch.Tensor]] = {}
    results = []
    for dtype in ("float32", given.half):
        for compiled in (False, True):
            target = Target(recipe.target, dtype)
            untaught = {} if taught else new_methods(recipe, target)
            taught |= {name: teach(one.draft, target, given) for name, one in untaught.items()}
            methods = new_methods(recipe, target, taught)
            if compiled:
                target.compile(**given.compiler)
            else:
                tree = TreeConfig(paths="eagle-1", siblings="drawn")
                methods["eagle-drawn"] = LoadedMethod(methods["eagle"].draft, tree)
            measured = report.by_place(decoded(recipe, target, methods, given.shape.prompts))
            for (_, temperature, method), found in measured.items():
                gate = {"passed": bool(found["lossless"].value), **found["lossless"].details}
                kept = {"draft": method, "temperature": temperature, "tau": found["tau"].value, "gate": gate}
                results.append({"dtype": dtype, "compiled": compiled, **kept})
    passed = all(one["gate"]["passed"] for one in results)
    return {"passed": passed, "proofs": dict(map(proof, results)), "results": results}


def proof(one: dict[str, Any]) -> tuple[str, str]:
    """(what was decoded, what the gate says of it) of a result."""
    gate, kind = one["gate"], "compiled" if one["compiled"] else "eager"
    what = f"{one['dtype']}, {kind}, T = {one['temperature']:g}, {one['draft']}"
    shown = f"{gate['identical']} of {gate['checked']} identical, {gate['near_ties']} near ties"
    if gate["drawn"]:
        shown = f"fit p = {gate['fit']:.2g}"
    shown += f", drift {gate['largest_drift']:.0e} in {gate['rounds']} rounds" if gate["rounds"] else ""
    verdict = "lossless" if gate["passed"] else "NOT LOSSLESS"
    return what, f"{verdict}: {shown}; tau {one['tau']:.2f}"


def decoded(recipe: Recipe, target: Target, methods: dict[str, LoadedMethod], count: int) -> list[reports.Row]:
    """The rows of so many random prompts."""
    harness = Harness(recipe, target, methods)
    tasks = [EvalTask("random", prompt, t) for t in recipe.eval.temperatures for prompt in prompts(count)]
    records, gates, _ = pooled([(task.benchmark, harness.decode(task)) for task in tasks])
    return report.rows(records, gates, {name: {} for name in methods})


def prompts(count: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    texts = [" ".join(map(str, torch.randint(256, (8 + 4 * n,), generator=generator).tolist())) for n in range(count)]
    return [Prompt(str(number), "random", (text,)) for number, text in enumerate(texts)]


def teach(draft: TrainedDraft, target: Target, given: Given) -> dict[str, torch.Tensor]:
    """The draft's weights once it knows the target's greedy answers to the prompts."""
    rows, sampling = [], Sampling(given.shape.answer, frozenset(target.stop_ids()))
    for prompt in prompts(given.shape.prompts):
        ids = prompt_ids(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        tokens = torch.tensor(ids + plain(target, ids, sampling).tokens)
        mask = torch.ones(len(tokens), dtype=torch.uint8).numpy()
        rows.append(Row(prompt.question_id, tokens.int().numpy(), mask, target.capture(tokens[None])[0].clone().cpu()))
    objective = objective_of(draft.config)
    totals = dict.fromkeys(objective.groups, sum(len(row.input_ids) for row in rows))
    batch = collate(rows, objective, totals).to(target.device, target.dtype)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(TEACHING):
        optimizer.zero_grad()
        objective.loss(draft, batch)[0].backward()
        optimizer.step()
    return {name: value.cpu() for name, value in draft.state_dict().items()}
