"""A `skipper` as what FTP makes it: the target with fewer blocks a token, by how much it loses.

    python -m eval.pruned RECIPE [--search DRAFT --tries 40]

After train/main.py. For each skipper, along the held-out dialogues: how many pairs of a token and a block pass by; and
over the assistant's tokens perplexity, agreement with the whole target's likeliest token, and the mean of
sum min(p, q), with which a drawn token would be accepted. Beside the trained routers, at the same sparsity: the static
ones that they began as, random tokens in their place, and the whole blocks of least influence dropped
(ShortGPT, arXiv 2403.03853). The rows go to results.jsonl of the run; eval.results draws them.

`--search` prints a share for each block, to be the draft's `sparsity` in the recipe. It starts from the draft's own or
from the dropped blocks, whichever static target is closer to the whole one along training dialogues (KL divergence). In
each try up to 0.2 or all of one block's share goes to another, and stays there if that comes closer.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eval import results
from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import readable_spec
from pipeline.artifacts.reports import Row, origin_of, put_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.drafts import build
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.skipper import Skipper, SkipperConfig
from pipeline.features.shards import FeatureStore
from pipeline.features.text import some_texts
from pipeline.lm.model import Target, fingerprint
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry

WHOLE, TRAINED, STATIC, CHANCE = "whole", "trained routers", "static routers", "random tokens"
DROPPED = "blocks dropped"
STEP = 0.2  # the largest part of a share that moves in a try, unless all of it does
MOST = 0.98  # the largest share that the search gives a block: it leaves a router something to decide
CHUNK = 256  # positions whose logits are formed at once


@dataclass
class Sums:
    """Over the assistant's tokens of some dialogues."""

    tokens: int = 0
    nats: float = 0.0  # -log q of the text
    agree: int = 0  # likeliest tokens that are the whole target's
    accepted: float = 0.0  # sum min(p, q)
    apart: float = 0.0  # KL(p || q)
    pairs: int = 0  # of a token and a block
    passed: float = 0.0  # of these

    def facts(self) -> dict[str, float]:
        return {
            "passed by": self.passed / self.pairs,
            "perplexity": float(torch.tensor(self.nats / self.tokens).exp()),
            "agreement": self.agree / self.tokens,
            "acceptance": self.accepted / self.tokens,
        }


Text = tuple[Tensor, Tensor]  # tokens (1, T); whether each is the assistant's (T)


class Whole:
    """The target, and what it says of some texts."""

    def __init__(self, recipe: Recipe):
        self.target = Target(recipe.target, recipe.eval.dtype)
        self.embed_head = self.target.embed_head(fingerprint(recipe.target))

    def draft(self, config: SkipperConfig) -> Skipper:
        """A draft of these settings whose routers are the static ones."""
        draft = build(config, shapes_of(self.target.config))
        assert isinstance(draft, Skipper)
        draft.initialise(0)
        return self.bound(draft)

    def bound(self, draft: Any) -> Skipper:
        draft.to(self.target.device, self.target.dtype).bind(self.embed_head)
        return draft

    @torch.inference_mode()
    def compare(self, draft: Skipper, texts: list[Text], bar: Progress | None = None) -> Sums:
        sums = Sums()
        for tokens_BT, assistant_T in (tuple(x.to(self.target.device) for x in text) for text in texts):
            whole_TD = self.target.capture(tokens_BT)[0]
            hidden_TD = draft.through(tokens_BT, None)[0]
            kept = torch.stack(draft.walk.kept)
            sums.pairs, sums.passed = sums.pairs + kept.numel(), sums.passed + (kept < 0.5).sum().item()
            places = assistant_T[1:].nonzero()[:, 0]  # whose next token is the assistant's
            for at in places.split(CHUNK):
                p, q = (self.target.head(x[at]).float().log_softmax(-1) for x in (whole_TD, hidden_TD))
                sums.tokens += len(at)
                sums.nats -= q.gather(1, tokens_BT[0, at + 1, None]).sum().item()
                sums.agree += (p.argmax(-1) == q.argmax(-1)).sum().item()
                sums.accepted += torch.minimum(p, q).exp().sum().item()
                sums.apart += (p.exp() * (p - q)).sum().item()
            if bar:
                bar.advance(1)
        return sums


class ByChance(nn.Module):
    """In a router's place: lets random tokens pass by. A text's first ones are kept, so a little fewer than asked."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, numbers: Tensor) -> Tensor:
        """The score (...) for numbers (..., 4), the last of which is the share that passes by."""
        share = numbers[..., -1]
        return torch.rand(share.shape, generator=self.generator).to(share.device) - share


@torch.inference_mode()
def influences(draft: Skipper, texts: list[list[int]]) -> list[float]:
    """Each block's mean over tokens of 1 - cos(before, after), in the whole target."""
    shares, found = draft.shares, []

    def keep(_module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        found.append(1 - torch.cosine_similarity(inputs[0].float(), out.float(), dim=-1).mean().item())

    hooks = [block.register_forward_hook(keep) for block in draft.blocks]
    draft.shares = [0.0] * len(shares)
    draft.start_from_target(texts)
    draft.shares = shares
    for hook in hooks:
        hook.remove()
    return found


def ways(whole: Whole, recipe: Recipe, name: str, texts: list[list[int]]) -> Iterator[tuple[str, Skipper]]:
    """The draft as it was trained, and its sparsity had in simpler ways."""
    checkpoint.require_trained_under(recipe, name)
    trained = whole.bound(checkpoint.load(recipe.draft_dir(name), whole.embed_head.fingerprint))
    yield TRAINED, trained
    static = whole.draft(trained.config)
    static.start_from_target(texts)
    yield STATIC, static
    drawn = whole.draft(trained.config)
    drawn.routers = nn.ModuleDict({block: ByChance(recipe.seed + int(block)) for block in drawn.routers})
    yield CHANCE, drawn
    dropped = whole.draft(trained.config)
    dropped.shares = to_least(dropped, range(len(dropped.shares)), round(sum(dropped.shares)), 1.0, texts)
    yield DROPPED, dropped


def to_least(draft: Skipper, blocks: Sequence[int], total: float, most: float, texts: list[list[int]]) -> list[float]:
    """The draft's shares, but these blocks have `total` of them: those of least influence, at most so much each."""
    found, shares = influences(draft, texts), list(draft.shares)
    for block in sorted(blocks, key=lambda one: found[one]):
        shares[block] = min(most, total)
        total -= shares[block]
    return shares


def search(whole: Whole, config: SkipperConfig, texts: list[list[int]], tries: int, seed: int) -> list[float]:
    """Shares of the same sum. A function of its arguments. Raises PipelineError where they leave no room for moves."""
    chance, draft = random.Random(seed), whole.draft(config)
    checked = [(torch.tensor([text]), torch.ones(len(text), dtype=torch.bool)) for text in texts]

    def distance(shares: list[float]) -> float:
        draft.shares = shares
        draft.start_from_target(texts)
        sums = whole.compare(draft, checked)
        return sums.apart / sums.tokens

    movable = [block for block, share in enumerate(draft.shares) if 0 < share < 1]
    if len(movable) < 2:
        raise PipelineError("--search moves shares between blocks: it needs two whose share is between 0 and 1")
    total = sum(draft.shares[block] for block in movable)
    if total > MOST * len(movable):
        raise PipelineError(
            f"--search lets at most {MOST} of a block's tokens pass by, but the shares that it can move are "
            f"{total / len(movable):.3f} on average: give the draft a smaller sparsity"
        )
    starts = [draft.shares, to_least(draft, movable, total, MOST, texts)]
    apart = [distance(shares) for shares in starts]
    least, best = min(zip(apart, starts, strict=True))
    with Progress("search", tries, "tries") as bar:
        for _ in range(tries):
            giver = chance.choice([block for block in movable if best[block] > 0])
            taker = chance.choice(movable)
            wanted = chance.choice((chance.uniform(0, STEP), 1.0))
            part = min(wanted, best[giver], MOST - best[taker])
            shares = list(best)
            shares[giver], shares[taker] = shares[giver] - part, shares[taker] + part
            if giver != taker and part > 0 and (found := distance(shares)) < least:
                best, least = shares, found
            bar.advance(1, KL=f"{apart[0]:.3f} own, {apart[1]:.3f} dropped -> {least:.3f}")
    return [round(share, 3) for share in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--search", metavar="DRAFT", help="look for a share for each block of this skipper")
    parser.add_argument("--tries", type=int, default=40)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    skippers = {name: one for name, one in recipe.draft.items() if isinstance(one, SkipperConfig)}
    if arguments.search not in (None, *skippers):
        parser.error(f"--search {arguments.search}: the recipe's skippers are {', '.join(skippers) or 'none'}")
    if not skippers:
        raise PipelineError(f"{arguments.recipe} has no draft of kind 'skipper'")
    expected = readable_spec(recipe)
    texts = some_texts(FeatureStore(recipe.shards_dir, "train", expected).texts)
    whole = Whole(recipe)
    if arguments.search:
        found = search(whole, skippers[arguments.search], texts, arguments.tries, recipe.seed)
        print(f"sparsity = {found}  # of [draft.{arguments.search}]")
        return
    heldout = FeatureStore(recipe.shards_dir, "validation", expected).texts
    given = [(heldout.ids(number), heldout.mask(number)) for number in range(len(heldout))]
    checked = [(torch.tensor(ids[None].astype("int64")), torch.tensor(mask.astype(bool))) for ids, mask in given]
    nothing = whole.draft(next(iter(skippers.values())))
    nothing.shares = [0.0] * len(nothing.shares)
    rows: list[Row] = []

    def measure(name: str, way: str, draft: Skipper) -> None:
        what = {"setting": {"way": way}, "origin": origin_of(recipe, name)}
        facts = whole.compare(draft, checked, bar).facts()
        rows.extend(Row("pruned", name, figure, value, **what) for figure, value in facts.items())

    with Progress("pruned", len(checked) * (1 + 4 * len(skippers)), "dialogues") as bar:
        measure("target", WHOLE, nothing)
        for name in skippers:
            for way, draft in ways(whole, recipe, name, texts):
                measure(name, way, draft)
    put_rows(recipe.eval_dir, rows, whole=True)
    print(results.table(results.found_by(recipe, rows)))


if __name__ == "__main__":
    entry.run(main)
