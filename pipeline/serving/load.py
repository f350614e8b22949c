"""A release on its target, in Python: ``pipeline.load("release/").generate("What is a prime number?").text``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.lm.chat import Messages, prompt_ids
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.untrusted import DecodingRecipe, parse_untrusted

OnTokens = Callable[[list[int]], None]  # called with the tokens of each round


@dataclass(frozen=True)
class GeneratedAnswer:
    """An answer with its measurements."""

    text: str
    tokens: list[int]
    depths: list[int]  # of each token in the tree that proposed it; 0: the target's own
    tau: float  # acceptance length: tokens a pass of the target
    seconds: float  # after the prefill

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, which the prefill gives, per second."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds > 0 else 0.0


class LoadedRelease:
    """A draft on its target."""

    def __init__(self, folder: Path, config: TargetConfig, dtype: str):
        """Load the draft and its target. Raise PipelineError for a folder without a release, and for another target
        than the draft's.
        """
        target_fingerprint = fingerprint(config)
        draft = checkpoint.load(folder, target_fingerprint)
        self.target = Target(config, dtype)
        draft.to(self.target.device, self.target.dtype)
        draft.bind(self.target.embed_head(target_fingerprint))
        self.method = checkpoint.read_config(folder).load_method(draft)

    def generate(
        self,
        prompt: str | Messages,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        plainly: bool = False,
        on_tokens: OnTokens = lambda _: None,
    ) -> GeneratedAnswer:
        """Answer a question or a conversation ({"role", "content"}, the user's turn last); with `plainly`, without the
        draft. At temperature 0 in float32 both give the same tokens.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tokenizer, stop = self.target.tokenizer, frozenset(self.target.stop_ids())
        sampling = Sampling(max_new_tokens, stop, temperature, top_k, top_p, repetition_penalty, seed)
        ids = prompt_ids(tokenizer, messages)

        def listen(new: list[int]) -> None:  # returns None: another value would end the answer
            on_tokens(new)

        if plainly:
            result = decode_plain(self.target, ids, sampling, on_tokens=listen)
        else:
            result = decode_speculative(self.target, self.method, ids, sampling, on_tokens=listen)
        tau = result.acceptance.tau if result.acceptance.passes else 1.0
        text = tokenizer.decode(result.tokens, skip_special_tokens=True)
        return GeneratedAnswer(text, result.tokens, result.depths, tau, result.seconds)


def load(
    folder: str | Path,
    target: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    adapter: str | None = None,
) -> LoadedRelease:
    """Load a release (its folder) on its target, in the dtype that it was measured in unless another is given.

    `target`: folder or Hub id, where the release does not know it; `adapter`: as in a recipe's target.adapter. Raise
    PipelineError.
    """
    folder = Path(folder).expanduser()
    require_release(folder)
    config = target_of(folder, target, device, trust_remote_code)
    if adapter is not None:
        config = config.model_copy(update={"adapter": adapter})
    return LoadedRelease(folder, config, dtype or _read_decoding(folder).eval.dtype)


def locate_release(place: Path) -> tuple[Path, Recipe | None]:
    """Return a release's folder, and the recipe if the user named one instead: a file, or a name in `shipped()`. Raise
    PipelineError where there is no release.
    """
    if place.is_dir():
        require_release(place)
        return place, None
    recipe = load_recipe(str(place))
    require_release(recipe.paths.release, str(place))
    return recipe.paths.release, recipe


def require_release(folder: Path, recipe: str | None = None) -> None:
    """Raise PipelineError for a folder without a release, with the command that makes one. `recipe`: the recipe that
    the user named, whose release the folder is.
    """
    if (folder / checkpoint.CONFIG).is_file():
        return
    if recipe is not None:
        raise PipelineError(
            f"{recipe} has no release yet ({folder} does not exist): jakiro run {recipe} trains, measures and makes "
            f"it; jakiro status {recipe} shows what is done"
        )
    inner = folder / "release"
    remedy = (
        f"did you mean {inner}?"
        if (inner / checkpoint.CONFIG).is_file()
        else "expected the release of a run (runs/NAME/release), which jakiro run RECIPE ends with"
    )
    raise PipelineError(f"{folder} holds no release ({checkpoint.CONFIG} is missing): {remedy}")


def target_of(
    folder: Path, target: str | None = None, device: str = "auto", trust_remote_code: bool = False
) -> TargetConfig:
    """Return the config of a release's target, with its chat template. Raise PipelineError where the folder is no
    release, or does not name a target that can be found.
    """
    template = checkpoint.sealed_file(folder, checkpoint.TEMPLATE)
    released = _read_decoding(folder).target
    if target is None and not released.is_on_hub:
        raise PipelineError(
            f"{folder} was made with a target that is called {released.model!r}, which is no OWNER/NAME of the Hub: "
            "pass target=FOLDER, or the Hub's OWNER/NAME (chat, serve: --target; eval: --set target.model=FOLDER)"
        )
    return released.config(target or released.model, template, device, trust_remote_code)


def _read_decoding(folder: Path) -> DecodingRecipe:
    remedy = "Download the release again"
    return parse_untrusted(DecodingRecipe, read_sealed(folder / RECIPE, remedy), folder / RECIPE, remedy)
