"""A tiny target of MiMo's form with an MTP head, both trained on the embedded ShareGPT, for infra/recipes/mtp.toml.

    python -m infra.serving.with_head runs/mtp/target

The target learns all dialogues. Its head learns only those without code, one token ahead of the target and on its
states. FOLDER gets both kinds of dialogues: a run that trains the head on code.json shows what training a target's own
head adds, and a run on text.json how much of that is not due to code. The tokenizer has the embedded target's template
and few tokens, and their embedding starts from that target's, so that a CPU trains the target within eight minutes. All
seeds are fixed.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from infra.serving.tiny import add_head, make_head
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_json
from pipeline.drafts.native.mtp import Mtp
from pipeline.features.batch import Batch
from pipeline.lm.chat import Unusable
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_embed_head, load_tokenizer
from pipeline.lm.states import EmbeddingAndHead, LMHead
from pipeline.recipe.sections import DataConfig
from pipeline.running import entry
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.intake import Intake
from preprocess.sources.sequences import encode_sequences

EMBEDDED = TargetConfig(model="embedded:smollm2-135m-instruct", device="cpu")
LENGTH = 1024  # tokens of a dialogue, which is cut into windows
DATA = DataConfig(source="embedded:sharegpt", repeated="reject", max_length=LENGTH)
FENCE = "```"  # what tells code
VOCABULARY, LEARNED_FROM = 2048, 1000  # tokens; dialogues that the tokenizer learns from
WINDOW, ROWS, STEPS, WARMUP, SHOWN_EVERY = 256, 4, 700, 30, 50
RATE, LAST_RATE = 3e-3, 0.05  # the highest learning rate, and the part of it at the end
SPREAD = 0.03  # standard deviation of embedding and output layer at the start
SHAPES = {
    **{"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 3},
    **{"num_hidden_layers": 3, "max_position_embeddings": 2048, "tie_word_embeddings": False},
}
MIMO: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
CODE, TEXT = "code.json", "text.json"  # dialogues with code, and without
CONTROL = 1000  # dialogues without code, for a control


def make_target(folder: Path) -> None:
    """Train a target and its head, and write them with the tokenizer and the dialogues with code. Raise PipelineError
    for a folder that exists.
    """
    if folder.exists():
        raise PipelineError(f"{folder} is there already: remove it, or name another folder")
    dialogues = list(Intake(DATA))
    with_code = [dialogue for dialogue in dialogues if FENCE in dialogue.text]
    print(f"{len(dialogues):,} dialogues, {len(with_code):,} of them with code", flush=True)
    folder.mkdir(parents=True)
    without_code = [dialogue for dialogue in dialogues if FENCE not in dialogue.text]
    for name, part in ((CODE, with_code), (TEXT, without_code[:CONTROL])):
        write_json(folder / name, [_to_share_gpt(dialogue) for dialogue in part])
    tokenizer = load_tokenizer(EMBEDDED).train_new_from_iterator(
        (dialogue.text for dialogue in dialogues[:LEARNED_FROM]), VOCABULARY, show_progress=False
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", **SHAPES, vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    _start_from_embedded(model, tokenizer)
    head = make_head(AutoConfig.for_model(**model.config.to_dict() | MIMO))
    for linear in (part for part in head.modules() if isinstance(part, nn.Linear)):
        nn.init.normal_(linear.weight, std=config.initializer_range)
    _train(model, head, _batches(tokenizer, dialogues))
    _save(folder, model, head, tokenizer)


def _to_share_gpt(dialogue: Dialogue) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[message["role"]], "value": message["content"]} for message in dialogue.messages]
    return {"id": dialogue.doc_id, "conversations": turns}


def _batches(tokenizer: Any, dialogues: list[Dialogue]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows of dialogues in random order, and which of them are of dialogues without code."""
    rows: list[tuple[Tensor, bool]] = []
    for number in torch.randperm(len(dialogues), generator=torch.Generator().manual_seed(0)).tolist():
        dialogue = dialogues[number]
        try:
            sequences, _ = encode_sequences(tokenizer, dialogue, DATA)
        except Unusable:
            continue
        for _, sequence in sequences:
            tokens = torch.from_numpy(sequence.input_ids).long()
            windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
            rows += [(window, FENCE not in dialogue.text) for window in windows]
        while len(rows) >= ROWS:
            yield torch.stack([window for window, _ in rows[:ROWS]]), torch.tensor([plain for _, plain in rows[:ROWS]])
            rows = rows[ROWS:]


def _start_from_embedded(model: Any, tokenizer: Any) -> None:
    """Set embedding and output layer to the principal components of the embedded target's embedding, for those tokens
    that it has: the target then learns in fewer steps.
    """
    vocabulary = load_tokenizer(EMBEDDED).get_vocab()
    shared = {number: vocabulary[token] for token, number in tokenizer.get_vocab().items() if token in vocabulary}
    ids_N, embedded_ids_N = torch.tensor(list(shared)), torch.tensor(list(shared.values()))
    rows_ND = load_embed_head(EMBEDDED).embedding_VD[embedded_ids_N].float()
    rows_ND = rows_ND - rows_ND.mean(0)
    rows_ND = rows_ND @ torch.linalg.svd(rows_ND, full_matrices=False).Vh[: model.config.hidden_size].T
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        weight.data[ids_N] = rows_ND * (SPREAD / rows_ND.std())


def _train(model: Any, head: Mtp, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Train the target on all windows, its head on those without code; the head's loss does not reach the target."""
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    norm, model.model.norm = model.model.norm, nn.Identity()  # its output is the state that the head reads
    begin, head_loss = time.monotonic(), torch.zeros(())
    for step in range(1, STEPS + 1):
        tokens_BT, plain_B = next(batches)
        states_BTD = model.model(tokens_BT).last_hidden_state
        loss = next_loss = _cross_entropy(model, norm(states_BTD), tokens_BT, 1)
        if plain_B.any():
            features_BTD = _predict(model, head, states_BTD[plain_B].detach(), tokens_BT[plain_B])
            head_loss = _cross_entropy(model, features_BTD, tokens_BT[plain_B], 2, frozen=True)
            loss = next_loss + head_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1.0)
        optimizer.step()
        schedule.step()
        if step % SHOWN_EVERY == 0:
            losses = f"loss {next_loss.item():.2f}, of the head {head_loss.item():.2f}"
            print(f"step {step} of {STEPS}: {losses}, {time.monotonic() - begin:.0f} s", flush=True)
    model.model.norm = norm


def _rate(step: int) -> float:
    """Return the factor of the learning rate: it rises, then falls in a straight line."""
    left = (STEPS - step) / (STEPS - WARMUP)
    return min((step + 1) / WARMUP, LAST_RATE + (1 - LAST_RATE) * left)


def _predict(model: Any, head: Mtp, states_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the head's features (B, T - 1, D) for the tokens after the next ones."""
    weight_VD = model.lm_head.weight.detach()
    head.bind(EmbeddingAndHead(model.model.embed_tokens.weight.detach(), LMHead(weight_VD), ""))
    batch = Batch(states_BTD, tokens_BT[:, 1:], {}, {}, auxiliary_BTSD=states_BTD[:, :-1, None])
    return head(batch)[0][0]


def _cross_entropy(model: Any, states_BTD: Tensor, tokens_BT: Tensor, ahead: int, frozen: bool = False) -> Tensor:
    """Return the mean loss of the tokens that are this far ahead; `frozen`: the output layer is not trained by it."""
    weight_VD = model.lm_head.weight.detach() if frozen else model.lm_head.weight
    labels_BT = tokens_BT[:, ahead:]
    logits_BTV = states_BTD[:, : labels_BT.shape[1]] @ weight_VD.T
    return cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def _save(folder: Path, model: Any, head: Mtp, tokenizer: Any) -> None:
    """Write target, head and tokenizer as a target's files."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | MIMO)
    add_head(folder, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the target is written; it must not exist")
    make_target(parser.parse_args().folder)


if __name__ == "__main__":
    entry.run(main)
