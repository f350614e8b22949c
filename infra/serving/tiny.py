"""Tiny targets with what the embedded one has not, each with an EAGLE-3 draft that knows its answers, and with drafts
that would take long to train for the embedded one: P-EAGLE, DFlash, Medusa, a small Llama; EAGLE and DFlash with a
window.

RoPE that is scaled from 64 positions on, as Llama 3.1 and YaRN do it; auxiliary layers that are no engine's default, so
that one which reads others accepts less; a prompt that goes through an engine in several batches. Weights are random,
the tokenizer is the embedded target's.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipeline.artifacts import checkpoint
from pipeline.decoding.generate import Sampling, plain
from pipeline.drafts import TrainedDraft, build, objective_of
from pipeline.drafts.eagle3 import Eagle3Frame
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.batch import collate
from pipeline.features.schema import Row
from pipeline.lm.model import Target, fingerprint, source
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe

LAYERS, AUXILIARY, POSITIONS, SCALED_FROM = 24, [1, 10, 20], 2048, 64
LENGTHS = (12, 300, 1500)  # tokens of the prompts: all but the first go beyond the original positions
VOCABULARY = 1024
TAUGHT = {"small": (2e-3, 4), "dflash": (3e-3, 40)}  # learning rate and steps, where these are not
USUAL = (1e-2, 4)
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


def tiny(path: Path, kind: str, tokens: int, work: Path) -> tuple[Recipe, list[list[int]]]:
    """The recipe at `path` with a target of RoPE of this kind and its drafts, trained; and prompts for them, whose
    answers have so many tokens.
    """
    folder = work / f"tiny-{kind}"
    words = _save(Path(source(load_recipe(path).target).name), folder, kind)
    sets = [f"draft.{name}={settings}" for name, settings in DRAFTS[kind].items()]
    recipe = load_recipe(path, [f"target.model={folder}", f"output={folder / 'run'}", *sets])
    generator = torch.Generator().manual_seed(0)
    prompts = [words[torch.randint(len(words), (length,), generator=generator)].tolist() for length in LENGTHS]
    target = Target(recipe.target, "float32")
    answers = [plain(target, prompt, Sampling(tokens, frozenset())).tokens for prompt in prompts]
    for name in DRAFTS[kind]:
        made = _taught(recipe, name, target, prompts, answers)
        checkpoint.save(recipe.paths.draft(name), made, made.state_dict(), recipe, name, {})
    return recipe, prompts


def _save(embedded: Path, folder: Path, kind: str) -> torch.Tensor:
    """Writes a target; returns the tokens that it knows: whole ASCII words, as engines give text back, too."""
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
    others = torch.ones(len(embedding), dtype=torch.bool).index_fill_(0, words, False)
    embedding[others] = 0.0  # never the likeliest
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return words


def _taught(
    recipe: Recipe, name: str, target: Target, prompts: list[list[int]], answers: list[list[int]]
) -> TrainedDraft:
    """A draft that has seen these answers and nothing else."""
    draft = build(recipe.draft[name], shapes_of(target.config))
    draft.initialise(0)
    if draft.token_ids_U is not None:
        known = sorted({token for answer in answers for token in answer})
        others = [token for token in range(2 * VOCABULARY) if token not in known]
        draft.set_vocabulary(torch.tensor(sorted([*known, *others[: VOCABULARY - len(known)]])))
    draft.bind(target.embed_head(fingerprint(recipe.target)))
    draft.start_from_target([])
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        states_TSD = target.capture_all(tokens[None], list(draft.needs.auxiliary))[0].clone()
        mask = (torch.arange(len(tokens)) >= len(prompt)).to(torch.uint8)
        rows.append(Row("", tokens.int().numpy(), mask.numpy(), states_TSD[:, 0], states_TSD[:, 1:]))
    frozen = _bound(draft, rows[0].auxiliary_TKD) if isinstance(draft, Eagle3Frame) else []
    objective, total = objective_of(draft.config), sum(map(len, answers))
    totals = dict.fromkeys(objective.groups, total)
    batches = [collate([row], objective, totals, auxiliary=range(len(draft.needs.auxiliary))) for row in rows]
    trained = [weight for weight in draft.parameters() if not any(weight is one for one in frozen)]
    rate, steps = TAUGHT.get(name, USUAL)
    optimizer = torch.optim.AdamW(trained, lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in batches:
            objective.loss(draft, batch)[0].backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


def _bound(draft: Any, states_TKD: Any) -> list[torch.Tensor]:
    """What it guesses is to depend on the layers that it reads and on where tokens stand, not on the last token alone,
    by which a few answers are learnt most easily: the embedding gives nothing, each layer as much as the others, and
    attention nearly all. Returns what is not trained then.
    """
    frozen = [draft.midlayer.input_layernorm.weight, draft.fc.weight]
    frozen[0].data.zero_()
    sizes_K = 100 * states_TKD.square().mean((0, 2)).sqrt()  # what goes into the attention is normed
    frozen[1].data.div_(sizes_K.repeat_interleave(states_TKD.shape[2]))
    for weight in draft.midlayer.self_attn.parameters():
        weight.data.mul_(10)
    return frozen
