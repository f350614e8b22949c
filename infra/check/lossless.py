"""The part of `infra.check` that decodes: the harness's losslessness gate on a small random target, with drafts that
were trained on its answers.
"""

from typing import Any

import torch

from eval.measure import report
from eval.measure.harness import EvalTask, Harness, pool_outcomes
from eval.measure.prompts import BenchmarkPrompt
from infra.check.shapes import CheckSettings, new_methods, save_small_target
from pipeline.artifacts import reports
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.drafts import TrainedDraft, make_objective
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import Target
from pipeline.recipe.recipe import Recipe

TRAINING_STEPS = 150  # of a draft on the small target's answers, so that candidates are accepted


def measure_lossless(settings: CheckSettings) -> dict[str, Any]:
    """Run the harness's gate on a small target: both dtypes, eager and compiled, at both temperatures."""
    folder = settings.folder / "small"
    save_small_target(folder, settings.shape.small_width)
    overrides = ["eval.temperatures=[0.0, 1.0]", f"eval.max_new_tokens={settings.shape.answer_tokens}"]
    overrides += ["eval.repeats=1"]
    recipe = settings.recipe_of(folder, *overrides)
    trained_weights: dict[str, dict[str, torch.Tensor]] = {}
    results = []
    for dtype in ("float32", settings.half_dtype):
        for compiled in (False, True):
            target = Target(recipe.target, dtype)
            random_methods = {} if trained_weights else new_methods(recipe, target)
            for name, random in random_methods.items():
                trained_weights[name] = train_on_answers(random.draft, target, settings)
            methods = new_methods(recipe, target, trained_weights)
            if compiled:
                target.compile(**settings.compiler)
                for method in methods.values():
                    method.draft.compile_rounds(**settings.compiler)
            else:
                tree = TreeConfig(paths="eagle-1", siblings="drawn")
                methods["eagle-drawn"] = LoadedMethod(methods["eagle"].draft, tree)
            measured = report.group_by_place(decode_rows(recipe, target, methods, settings.shape.prompts))
            for (_, temperature, method), metrics in measured.items():
                gate = {"passed": bool(metrics["lossless"].value), **metrics["lossless"].details}
                figures = {"draft": method, "temperature": temperature, "tau": metrics["tau"].value, "gate": gate}
                results.append({"dtype": dtype, "compiled": compiled, **figures})
    passed = all(result["gate"]["passed"] for result in results)
    return {"passed": passed, "proofs": dict(map(format_gate, results)), "results": results}


def format_gate(result: dict[str, Any]) -> tuple[str, str]:
    """Return (what was decoded, the gate's outcome) of a result as text."""
    gate, kind = result["gate"], "compiled" if result["compiled"] else "eager"
    label = f"{result['dtype']}, {kind}, T = {result['temperature']:g}, {result['draft']}"
    text = f"{gate['identical']} of {gate['checked']} identical, {gate['near_ties']} near ties"
    if gate["drawn"]:
        text = f"fit p = {gate['fit']:.2g}"
    text += f", drift {gate['largest_drift']:.0e} in {gate['rounds']} rounds" if gate["rounds"] else ""
    verdict = "lossless" if gate["passed"] else "NOT LOSSLESS"
    return label, f"{verdict}: {text}; tau {result['tau']:.2f}"


def decode_rows(
    recipe: Recipe, target: Target, methods: dict[str, LoadedMethod], count: int
) -> list[reports.ResultRow]:
    """Decode `count` random prompts and return the report's rows."""
    harness = Harness(recipe, target, methods)
    tasks = [EvalTask("random", prompt, t) for t in recipe.eval.temperatures for prompt in random_prompts(count)]
    records, gates, _ = pool_outcomes([(task.benchmark, harness.decode(task)) for task in tasks])
    return report.build_rows(records, gates, {name: {} for name in methods})


def random_prompts(count: int) -> list[BenchmarkPrompt]:
    generator = torch.Generator().manual_seed(1)
    texts = [" ".join(map(str, torch.randint(256, (8 + 4 * n,), generator=generator).tolist())) for n in range(count)]
    return [BenchmarkPrompt(str(number), "random", (text,)) for number, text in enumerate(texts)]


def train_on_answers(draft: TrainedDraft, target: Target, settings: CheckSettings) -> dict[str, torch.Tensor]:
    """Train the draft on the target's greedy answers to the random prompts and return its weights."""
    rows, sampling = [], Sampling(settings.shape.answer_tokens, frozenset(target.stop_ids()))
    for prompt in random_prompts(settings.shape.prompts):
        ids = prompt_ids(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        tokens = torch.tensor(ids + decode_plain(target, ids, sampling).tokens)
        mask = torch.ones(len(tokens), dtype=torch.uint8).numpy()
        rows.append(
            TextRow(prompt.question_id, tokens.int().numpy(), mask, target.capture(tokens[None])[0].clone().cpu())
        )
    objective = make_objective(draft.config)
    totals = dict.fromkeys(objective.groups, sum(len(row.input_ids) for row in rows))
    batch = collate(rows, objective, totals).to(target.device, target.dtype)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        objective.loss(draft, batch)[0].backward()
        optimizer.step()
    return {name: value.cpu() for name, value in draft.state_dict().items()}
