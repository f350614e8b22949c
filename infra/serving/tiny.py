"""Tiny targets with features that the embedded target lacks, each with an EAGLE-3 draft trained on its answers, and
with drafts that would take long to train for the embedded target: P-EAGLE, DFlash, Medusa, a small Llama, Gumiho and
Hydra++; EAGLE and DFlash with a window. And tiny targets of families that come with an MTP head, which is trained on
their answers.

RoPE is scaled from 64 positions on, as in Llama 3.1 and YaRN; the auxiliary layers are no engine's default, so that an
engine which reads other layers accepts less; one prompt takes an engine several batches. Weights are random, the
tokenizer is the embedded target's.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.artifacts import checkpoint
from pipeline.basics.files import read_json, write_json
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.drafts import TrainedDraft, build, make_objective
from pipeline.drafts.eagle3 import Eagle3Frame
from pipeline.drafts.native.families import HEADS, to_file_names
from pipeline.drafts.native.files import read_head
from pipeline.drafts.native.mtp import Mtp, MtpConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow
from pipeline.lm.model import Target, fingerprint, locate_target
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe

LAYERS, AUXILIARY, POSITIONS, SCALED_FROM = 24, [1, 10, 20], 2048, 64
LENGTHS = (12, 300, 1500)  # tokens of the prompts: all but the first go beyond the original positions; the last is left
# out for a head, whose training computes all of its text
VOCABULARY = 1024
RATE_AND_STEPS = {
    "small": (2e-3, 4),
    "dflash": (3e-3, 40),
    "mtp": (5e-3, 80),
    **dict.fromkeys(("jakiro", "jakiro-scalar", "gumiho", "hydra", "hydra-shared"), (5e-3, 25)),
    "jakiro3": (1e-2, 6),
}  # learning rate and steps, if not the default ones
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
        "jakiro": f'{{kind="jakiro", vocabulary={VOCABULARY}}}',
        "jakiro-scalar": '{kind="jakiro", contrast="scalar"}',
        "jakiro3": EAGLE_3.replace('"eagle3"', '"jakiro", frame="eagle-3", experts=4'),
        "gumiho": f'{{kind="gumiho", vocabulary={VOCABULARY}}}',
        "hydra": '{kind="hydra"}',
        "hydra-shared": '{kind="hydra", own_head=false}',  # with the target's LM head
    },
    "yarn": {"eagle3": EAGLE_3, "dflash": DFLASH.replace("}", ", window=16}")},
    "mimo": {"mtp": '{kind="mtp", before_norm=true}'},
    "glm4_moe": {"mtp": '{kind="mtp"}'},
    "ernie4_5_moe": {"mtp": '{kind="mtp"}'},
    "hy_v3": {"mtp": '{kind="mtp"}'},
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1}
SHAPES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES |= {"head_dim": 64, "initializer_range": 0.15, "num_hidden_layers": 2, "tie_word_embeddings": False}
# Targets with an MTP head: transformers' name, settings, and keys of config.json that vLLM reads.
WITH_HEAD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mimo": ("qwen2", {}, {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}),
    "glm4_moe": ("glm4_moe", EXPERTS | {"use_qk_norm": True}, {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 128, "moe_layer_start_index": 1},
        {"num_nextn_predict_layers": 1},
    ),
    "hy_v3": (
        "hy_v3",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        {"first_k_dense_replace": 1, "expert_hidden_dim": 128, "route_norm": True, "qk_norm": True}
        | {"num_nextn_predict_layers": 1},
    ),
}


def make_tiny_target(path: Path, kind: str, tokens: int, work: Path) -> tuple[Recipe, list[list[int]]]:
    """Return the recipe at `path` with a target whose RoPE is of this kind and its trained drafts, and prompts, whose
    answers have `tokens` tokens.
    """
    folder = work / f"tiny-{kind}"
    words = _save_target(Path(locate_target(load_recipe(path).target).name), folder, kind)
    overrides = [f"draft.{name}={settings}" for name, settings in DRAFTS[kind].items()]
    recipe = load_recipe(path, [f"target.model={folder}", f"output={folder / 'run'}", *overrides])
    generator, lengths = torch.Generator().manual_seed(0), LENGTHS[:2] if kind in WITH_HEAD else LENGTHS
    prompts = [words[torch.randint(len(words), (length,), generator=generator)].tolist() for length in lengths]
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
    name, settings, keys = WITH_HEAD.get(
        kind, ("llama", {"num_hidden_layers": LAYERS, "tie_word_embeddings": True}, {})
    )
    if kind in ROPES:
        scaled = {"original_max_position_embeddings": SCALED_FROM, "factor": POSITIONS / SCALED_FROM}
        settings["rope_parameters"] = {"rope_type": kind} | scaled | ROPES[kind]
    config = AutoConfig.for_model(
        name, **SHAPES | settings, vocab_size=len(tokenizer), max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    embedding = model.get_output_embeddings().weight.data
    unused = torch.ones(len(embedding), dtype=torch.bool).index_fill_(0, words, False)
    embedding[unused] = 0.0  # never the likeliest
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | keys)
    if kind in WITH_HEAD:
        add_head(folder, make_head(AutoConfig.from_pretrained(folder)))
    return words


def make_head(config: Any) -> Mtp:
    """Return a random MTP head for a target of this configuration."""
    shapes = draft_shapes(config)
    head = build(MtpConfig(before_norm=HEADS[shapes["layer"]["family"]].before_norm, ttt_steps=1), shapes)
    assert isinstance(head, Mtp)
    return head


def add_head(folder: Path, head: Mtp) -> None:
    """Write a head's tensors into the file of its target."""
    form, path = head.form.names_in_files(head.shapes["target_layers"]), folder / checkpoint.WEIGHTS
    tensors = to_file_names(head.decoder, form, head.state_dict())
    checkpoint.write_weights(path, load_file(path) | {name: tensor.clone() for name, tensor in tensors.items()})


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
    read_head(draft, recipe.target)
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
