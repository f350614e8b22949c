"""Measure a `skipper` as FTP does: as the target with fewer blocks a token, by how much quality it loses.

    python -m eval.pruned RECIPE

Along the held-out dialogues: the share of (token, block) pairs in which the token skips the block; and over the
assistant's tokens perplexity, agreement with the full target's likeliest token, and the mean of sum min(p, q), with
which a drawn token would be accepted. Next to each draft's trained routers: the static routers that they started from,
and the full target.
"""

import argparse
import math
from collections import Counter

import torch
from torch import Tensor

from eval import results
from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import readable_spec
from pipeline.artifacts.reports import ResultRow, make_origin, replace_rows
from pipeline.basics.errors import PipelineError
from pipeline.drafts import build
from pipeline.drafts.native.skipper import Skipper, SkipperConfig
from pipeline.features.shards import FeatureStore
from pipeline.features.text import first_texts
from pipeline.lm.model import Target, fingerprint
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.running import entry

CHUNK = 256  # positions whose logits are computed at once


@torch.inference_mode()
def measure_losses(target: Target, draft: Skipper, texts: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the draft's loss of quality against its target, by figure; `texts` has tokens (1, T), and whether each is
    the assistant's (T).
    """
    sums: Counter[str] = Counter()
    for tokens_BT, assistant_T in ([x.to(target.device) for x in text] for text in texts):
        full_TD, hidden_TD = target.capture(tokens_BT)[0], draft.forward_texts(tokens_BT, None)[0]
        kept_blocks = torch.stack(draft.routing.computed)
        sums.update({"pairs": kept_blocks.numel(), "passed by": (kept_blocks < 0.5).sum().item()})
        positions = assistant_T[1:].nonzero()[:, 0]  # whose next token is the assistant's
        for chunk in positions.split(CHUNK):
            p, q = (target.head(x[chunk]).float().log_softmax(-1) for x in (full_TD, hidden_TD))
            agreement, acceptance = p.argmax(-1) == q.argmax(-1), torch.minimum(p, q).exp()
            sums.update({"tokens": len(chunk), "nats": -q.gather(1, tokens_BT[0, chunk + 1, None]).sum().item()})
            sums.update({"agreement": agreement.sum().item(), "acceptance": acceptance.sum().item()})
    means = {key: sums[key] / sums["tokens"] for key in ("nats", "agreement", "acceptance")}
    return {"passed by": sums["passed by"] / sums["pairs"], "perplexity": math.exp(means.pop("nats")), **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if not (skippers := [name for name, config in recipe.draft.items() if isinstance(config, SkipperConfig)]):
        raise PipelineError(f"{arguments.recipe} has no draft of kind 'skipper'")
    spec = readable_spec(recipe)
    train, heldout = (FeatureStore(recipe.paths.shards, split, spec).texts for split in ("train", "validation"))
    arrays = [(heldout.ids(number), heldout.mask(number)) for number in range(len(heldout))]
    texts = [(torch.tensor(ids[None].astype("int64")), torch.tensor(mask.astype(bool))) for ids, mask in arrays]
    target, rows = Target(recipe.target, recipe.eval.dtype), []
    embed_head = target.embed_head(fingerprint(recipe.target))
    for name in skippers:
        checkpoint.require_trained_under(recipe, name)
        trained = checkpoint.load(recipe.paths.draft(name), embed_head.fingerprint)
        static, full = (build(trained.config, trained.shapes) for _ in range(2))
        for draft in (trained, static, full):
            draft.to(target.device, target.dtype).bind(embed_head)
        static.start_from_target(first_texts(train))
        full.shares = [0.0] * len(full.shares)
        for variant, draft in {"whole": full, "trained routers": trained, "static routers": static}.items():
            row_facts = {"setting": {"way": variant}, "origin": make_origin(recipe, name)}
            rows += [
                ResultRow("pruned", name, key, value, **row_facts)
                for key, value in measure_losses(target, draft, texts).items()
            ]
    replace_rows(recipe.paths.eval, rows, all_methods=True)
    print(results.format_table(rows))


if __name__ == "__main__":
    entry.run(main)
