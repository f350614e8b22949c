"""Tiny targets with features that the embedded target lacks, each with an EAGLE-3 draft trained on its answers, and
with drafts that would take long to train for the embedded target: P-EAGLE, DFlash, Medusa, a small Llama; EAGLE and
DFlash with a window.

RoPE is scaled from 64 positions on, as in Llama 3.1 and YaRN; the auxiliary layers are no engine's default, so that an
engine which reads other layers accepts less; one prompt takes an engine several batches. Weights are random, the
tokenizer is the embedded target's.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipeline.artifacts import checkpoint
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.drafts import TrainedDraft, build, make_objective
from pipeline.drafts.eagle3 import Eagle3Frame
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow
from pipeline.lm.model import Target, fingerprint, locate_target
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe

LAYERS, AUXILIARY, POSITIONS, SCALED_FROM = 24, [1, 10, 20], 2048, 64
LENGTHS = (12, 300, 1500)  # tokens of the prompts: all but the first go beyond the original positions
VOCABULARY = 1024
RATE_AND_STEPS = {"small": (2e-3, 4), "dflash": (3e-3, 40)}  # learning rate and steps, if not the default ones
DEFAULT_RATE_AND_STEPS = (1e-2, 4)
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_theta": 1e4},
}
EAGLE_3 = f'{{kind="eagle3", ttt_steps=1, vocabulary={VOCABULARY}, auxiliary_layers={AUXILIARY}}}'
P_EAGLE = f'{{kind="p-eagle", layers=2, depths=3, vocabulary={VOCABULARY}, auxiliary_layers={AUXILIARY}}}'
DFLASH = f'{{kind="dflash", layers=2, block=4, auxiliary_layers={AUXILIARY}}}'
EAGLE = '{kind="eagle", window=6}'
SMALL = '{kind="small-llama", width=128, objective="hard-ce"}'
DRAFTS = {  # by the target's RoPE
    "llama3": {
        "eagle3": EAGLE_3,
        "eagle": EAGLE,
        "p-eagle": P_EAGLE,
        "dflash": DFLASH,
        "medusa": '{kind="medusa", heads=3}',
        "small": SMALL,
    },
    "yarn": {"eagle3": EAGLE_3, "dflash": DFLASH.replace("}", ", window=16}")},
}


def make_tiny_target(path: Path, kind: str, tokens: int, work: Path) -> tuple[Recipe, list[list[int]]]:
    """Return the recipe at `path` with a target whose RoPE is of this kind and its trained drafts, and prompts, whose
    answers have `tokens` tokens.
    """
    folder = work / f"tiny-{kind}"
    words = _save_target(Path(locate_target(load_recipe(path).target).name), folder, kind)
    overrides = [f"draft.{name}={settings}" for name, settings in DRAFTS[kind].items()]
    recipe = load_recipe(path, [f"target.model={folder}", f"output={folder / 'run'}", *overrides])
    generator = torch.Generator().manual_seed(0)
    prompts = [words[torch.randint(len(words), (length,), generator=generator)].tolist() for length in LENGTHS]
    target = Target(recipe.target, "float32")
    answers = [decode_plain(target, prompt, Sampling(tokens, frozenset())).tokens for prompt in prompts]
    for name in DRAFTS[kind]:
        draft = _train_draft(recipe, name, target, prompts, answers)
        checkpoint.save(recipe.paths.draft(name), draft, draft.state_dict(), recipe, name, {})
    return recipe, prompts


def _save_target(embedded: Path, folder: Path, kind: str) -> torch.Tensor:
    """Save a target; return the tokens that it can emit: full ASCII words, which survive an engine's detokenization."""
    tokenizer: Any = AutoTokenizer.from_pretrained(embedded)
    texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = torch.tensor([number for number, text in enumerate(texts) if text[1:].isascii() and text[1:].isalpha()])
    rope = {"rope_type": kind, "original_max_position_embeddings": SCALED_FROM, "factor": POSITIONS / SCALED_FROM}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=POSITIONS,
        rope_parameters=rope | ROPES[kind], initializer_range=0.15, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    embedding = model.get_input_embeddings().weight.data
    unused = torch.ones(len(embedding), dtype=torch.bool).index_fill_(0, words, False)
    embedding[unused] = 0.0  # never the likeliest
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return words


def _train_draft(
    recipe: Recipe, name: str, target: Target, prompts: list[list[int]], answers: list[list[int]]
) -> TrainedDraft:
    """Train a draft on these answers and nothing else."""
    draft = build(recipe.draft[name], draft_shapes(target.config))
    draft.initialise(0)
    if draft.token_ids_U is not None:
        answer_tokens = sorted({token for answer in answers for token in answer})
        spare = [token for token in range(2 * VOCABULARY) if token not in answer_tokens]
        draft.set_vocabulary(torch.tensor(sorted([*answer_tokens, *spare[: VOCABULARY - len(answer_tokens)]])))
    draft.bind(target.embed_head(fingerprint(recipe.target)))
    draft.start_from_target([])
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        states_TSD = target.capture_all(tokens[None], list(draft.needs.auxiliary))[0].clone()
        mask = (torch.arange(len(tokens)) >= len(prompt)).to(torch.uint8)
        rows.append(TextRow("", tokens.int().numpy(), mask.numpy(), states_TSD[:, 0], states_TSD[:, 1:]))
    frozen = _scale_inputs(draft, rows[0].auxiliary_TKD) if isinstance(draft, Eagle3Frame) else []
    objective, total = make_objective(draft.config), sum(map(len, answers))
    totals = dict.fromkeys(objective.groups, total)
    batches = [collate([row], objective, totals, auxiliary=range(len(draft.needs.auxiliary))) for row in rows]
    trained = [weight for weight in draft.parameters() if not any(weight is tensor for tensor in frozen)]
    rate, steps = RATE_AND_STEPS.get(name, DEFAULT_RATE_AND_STEPS)
    optimizer = torch.optim.AdamW(trained, lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in batches:
            objective.loss(draft, batch)[0].backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


def _scale_inputs(draft: Any, states_TKD: Any) -> list[torch.Tensor]:
    """Scale a draft's inputs, so that its draft tokens depend on the layers that it reads and on positions. Otherwise
    it would learn a few answers from the last token alone. The embedding contributes nothing, all layers the same, and
    attention nearly everything. Return the weights that are not trained afterwards.
    """
    frozen = [draft.midlayer.input_layernorm.weight, draft.fc.weight]
    frozen[0].data.zero_()
    sizes_K = 100 * states_TKD.square().mean((0, 2)).sqrt()  # what goes into the attention is normed
    frozen[1].data.div_(sizes_K.repeat_interleave(states_TKD.shape[2]))
    for weight in draft.midlayer.self_attn.parameters():
        weight.data.mul_(10)
    return frozen
