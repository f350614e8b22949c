"""What `infra.check` measures: shapes of a target, a random one in the GPU's memory, and what is dumped and trained of
it.

The large target has no file of weights: `RandomLlama` is made where it will run, whatever loads it, with random values
of the usual scale. Its folder holds what else is read of a target: configuration, tokenizer, embedding and
head, which training reads from the file. The small one is saved whole, like any other.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.artifacts.features import feature_spec
from pipeline.basics.files import ROOT
from pipeline.decoding.config import LoadedMethod
from pipeline.drafts import build
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.schema import FeatureSpec, Row, row_dtype
from pipeline.features.shards import write_features
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.model import DTYPES, Target
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from preprocess.dump.worker import Document

RECIPE = ROOT / "infra/recipes/llama3.1-instruct-8b.toml"  # drafts, trees and training are those of the 8B recipe
WORDS = 256  # of the tokenizer: the numbers 0 ... 255, and the end of a turn
WEIGHTS = "model.safetensors"
GIB = 1 << 30


def device() -> str:
    """The device of every part: "cuda" (NVIDIA's and AMD's) where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """A target's, and how much of it is measured."""

    config: dict[str, Any]
    sets: tuple[str, ...] = ()  # of the recipe
    documents: int = 32  # of the dump, and of the training set
    context: int = 512  # tokens before those that are verified
    most: int = 128  # tokens verified at once
    small: int = 256  # hidden size of the target that losslessness is shown on
    answer: int = 48  # tokens of its answers
    prompts: int = 4  # that it answers
    memory: float = 0  # GiB that the GPU has to have free


def _llama(hidden: int, mlp: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": groups}


SHAPES = {  # from the largest on: without --shape the first that fits is taken
    "8b": Shape(_llama(4096, 14336, 32, 32, 8, 128256), memory=30),
    "1b": Shape(_llama(2048, 8192, 16, 32, 8, 128256), memory=11),
    "tiny": Shape(
        _llama(64, 128, 2, 4, 2, 512),
        (
            "data.max_length=48",
            "features.batch_tokens=256",
            "train.global_batch=4",
            "eval.methods.jakiro.tree={depth=3, top_k=3, nodes=10, parallel=2}",
            "eval.methods.eagle.tree={depth=3, top_k=3, nodes=10}",
        ),
        documents=12,
        context=32,
        most=12,
        small=64,
        answer=14,
        prompts=2,
    ),
}


class RandomConfig(LlamaConfig):
    model_type = "random_llama"


class RandomLlama(LlamaForCausalLM):
    """A Llama with random layers, made on the device that its configuration names (`made_on`); its embedding and head
    are the file's.
    """

    config_class = RandomConfig

    @classmethod
    def from_pretrained(cls, folder: str, *_: Any, config: RandomConfig, dtype: torch.dtype, **options: Any):
        with torch.device(config.made_on):
            model = cls._from_config(config, dtype=dtype)
        model.load_state_dict(load_file(Path(folder) / WEIGHTS, device=config.made_on), strict=False)
        return (model, {"missing_keys": set()}) if options.get("output_loading_info") else model


AutoConfig.register(RandomConfig.model_type, RandomConfig)
AutoModelForCausalLM.register(RandomConfig, RandomLlama)


def number_tokenizer() -> PreTrainedTokenizerFast:
    """A token a number below `WORDS`; a turn is its content and the end of it."""
    core = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    return tokenizer


def save_random_target(folder: Path, shape: Shape, dtype: str) -> None:
    """Everything of a target but its layers."""
    config = RandomConfig(
        **shape.config, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=WORDS, architectures=["RandomLlama"], made_on=device(),
    )  # fmt: skip
    config.save_pretrained(folder)
    number_tokenizer().save_pretrained(folder)
    generator = torch.Generator(device()).manual_seed(0)
    embed_head = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        values = torch.empty(config.vocab_size, config.hidden_size, dtype=DTYPES[dtype], device=device())
        embed_head[name] = values.normal_(std=config.initializer_range, generator=generator).cpu()
    save_file(embed_head, folder / WEIGHTS, metadata={"format": "pt"})


def save_small_target(folder: Path, width: int) -> None:
    """A whole one, of two layers. Its values are large enough for answers to depend on what stands before them, and its
    head's for a draft to guess what is drawn.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 1, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=1.7 / width**0.5,
        tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=WORDS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(8)
    model.save_pretrained(folder)
    number_tokenizer().save_pretrained(folder)


def documents(recipe: Recipe, shape: Shape) -> list[Document]:
    """Random ones, of a quarter of `data.max_length` up to all of it; the first quarter of each is the prompt's."""
    draw, longest, vocabulary = np.random.default_rng(0), recipe.data.max_length, shape.config["vocab_size"]
    lengths = np.linspace(longest // 4, longest, shape.documents).astype(int)
    return [
        Document(
            f"random-{number}",
            draw.integers(0, vocabulary, length, dtype=np.int32),
            (np.arange(length) >= length // 4).astype(np.uint8),
        )
        for number, length in enumerate(draw.permutation(lengths))
    ]


def write_random_features(recipe: Recipe, shape: Shape) -> None:
    """A training set whose features are random: what a step costs does not depend on what they are."""
    spec: FeatureSpec = feature_spec(recipe)
    generator, dtype = torch.Generator().manual_seed(0), row_dtype(spec.stored_dtype)
    rows = [
        Row(
            document.doc_id,
            document.input_ids,
            document.loss_mask,
            torch.randn(len(document.input_ids), spec.hidden_size, generator=generator).to(dtype),
        )
        for document in documents(recipe, shape)
    ]
    write_features(recipe.paths.features, spec, {"train": [rows]})


@dataclass(frozen=True)
class Given:
    """What a part is given to work with."""

    folder: Path
    shape_name: str
    seconds: float  # until the part is ended

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def half(self) -> str:
        """The dtype of everything that is not float32 by its nature."""
        return "bfloat16" if supported()["bfloat16"] else "float16"

    @property
    def compiler(self) -> dict[str, str]:
        """Arguments of `Target.compile`: on a CPU only its front end, which needs no C compiler."""
        return {"backend": "eager" if device() == "cpu" else "inductor"}

    def recipe(self) -> Recipe:
        """The recipe of the random target, whose folder is made when it is first asked for."""
        folder = self.folder / "target"
        if not folder.exists():
            begun = self.folder / "target.begun"
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir()
            save_random_target(begun, self.shape, self.half)
            begun.rename(folder)
        return self.recipe_of(folder)

    def recipe_of(self, target: Path, *sets: str) -> Recipe:
        """The 8B recipe on another target, for one GPU; `sets` as on a command line."""
        own = [f"target.model={target}", f"target.device={device()}", f"output={self.folder / 'run'}"]
        own += [f"{key}={self.half}" for key in ("target.dtype", "eval.dtype", "train.dtype", "features.stored_dtype")]
        own += ["features.workers=1", "train.ranks=1", "train.warmup_steps=0"]
        return load_recipe(RECIPE, [*own, "data.source=none", *self.shape.sets, *sets])


def supported() -> dict[str, bool]:
    """Dtypes that the device computes in by itself; emulated ones do not count."""
    if device() == "cpu":
        return {"bfloat16": True, "float16": True}
    return {
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        "float16": torch.cuda.get_device_capability() >= (5, 3),
    }


def new_methods(
    recipe: Recipe, target: Target, weights: dict[str, dict[str, torch.Tensor]] | None = None
) -> dict[str, LoadedMethod]:
    """The recipe's methods, bound to the target, in its dtype: with random weights, or with these."""
    found: dict[str, LoadedMethod] = {}
    embed_head = EmbeddingAndHead(target.embedding_VD, target.head, "random")
    for name, config in recipe.draft.items():
        draft = build(config, shapes_of(target.config))
        draft.initialise(recipe.seed)
        if weights:
            draft.load_state_dict(weights[name])
        draft.to(target.device, target.dtype).bind(embed_head)
        found[name] = LoadedMethod(draft, recipe.tree(name))
    return found
