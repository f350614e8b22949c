"""The shapes of the target that `infra.check` measures, a random target in the GPU's memory, and its random data.

The large target has no file of weights: `RandomLlama` is initialised on the device that runs it, with random values of
the usual scale. Its folder holds the other files of a target: configuration, tokenizer, and the embedding and head,
which training reads from the file. The small target is saved with all its weights, like any other.
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
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.schema import FeatureSpec, TextRow, row_dtype
from pipeline.features.shards import write_features
from pipeline.lm.model import DTYPES, Target
from pipeline.lm.states import EmbeddingAndHead
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from preprocess.dump.worker import EncodedDocument

RECIPE = ROOT / "infra/recipes/llama3.1-instruct-8b.toml"  # drafts, trees and training are those of the 8B recipe
VOCABULARY = 256  # tokens of the tokenizer: the numbers 0 ... 255; the end of a turn comes after them
WEIGHTS = "model.safetensors"
GIB = 1 << 30


def device() -> str:
    """Return the device of every part: "cuda" (NVIDIA and AMD) if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """A target's configuration, and how much is measured with it."""

    config: dict[str, Any]
    overrides: tuple[str, ...] = ()  # overrides of the recipe
    documents: int = 32  # number of dialogues of the dump, and of the training set
    context: int = 512  # tokens before the verified ones
    max_verified: int = 128  # the most tokens verified in one pass
    small_width: int = 256  # hidden size of the target of the losslessness gate
    answer_tokens: int = 48  # length of its answers
    prompts: int = 4  # number of prompts that it answers
    min_gib: float = 0  # GiB that have to be free on the GPU


def _llama(hidden: int, mlp: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": groups}


SHAPES = {  # largest first: without --shape the first one that fits is taken
    "8b": Shape(_llama(4096, 14336, 32, 32, 8, 128256), min_gib=30),
    "1b": Shape(_llama(2048, 8192, 16, 32, 8, 128256), min_gib=11),
    "tiny": Shape(
        _llama(64, 128, 2, 4, 2, 512),
        (
            "data.max_length=48",
            "features.batch_tokens=256",
            "train.global_batch=4",
            "train.pack_tokens=48",
            "eval.methods.jakiro.tree={depth=3, top_k=3, nodes=10, parallel=2}",
            "eval.methods.eagle.tree={depth=3, top_k=3, nodes=10}",
        ),
        documents=12,
        context=32,
        max_verified=12,
        small_width=64,
        answer_tokens=14,
        prompts=2,
    ),
}


class RandomConfig(LlamaConfig):
    model_type = "random_llama"


class RandomLlama(LlamaForCausalLM):
    """A Llama with random layers, created on the device that its configuration names (`made_on`); its embedding and
    head are read from the file.
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
    """Return a tokenizer with one token for each number below `VOCABULARY`; a turn is its content and an end token."""
    core = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    return tokenizer


def save_random_target(folder: Path, shape: Shape, dtype: str) -> None:
    """Save all files of a target, without its layers."""
    config = RandomConfig(
        **shape.config, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=VOCABULARY, architectures=["RandomLlama"], made_on=device(),
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
    """Save a complete target of two layers. Its weights are large enough that answers depend on the context, and the
    head's are large enough that a draft can guess sampled tokens.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY + 1, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=1.7 / width**0.5,
        tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=VOCABULARY,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(8)
    model.save_pretrained(folder)
    number_tokenizer().save_pretrained(folder)


def random_documents(recipe: Recipe, shape: Shape) -> list[EncodedDocument]:
    """Return random dialogues, from a quarter of `data.max_length` to its full length; the first quarter of each is the
    prompt.
    """
    draw, longest, vocabulary = np.random.default_rng(0), recipe.data.max_length, shape.config["vocab_size"]
    lengths = np.linspace(longest // 4, longest, shape.documents).astype(int)
    return [
        EncodedDocument(
            f"random-{number}",
            draw.integers(0, vocabulary, length, dtype=np.int32),
            (np.arange(length) >= length // 4).astype(np.uint8),
        )
        for number, length in enumerate(draw.permutation(lengths))
    ]


def write_random_features(recipe: Recipe, shape: Shape) -> None:
    """Write a training set with random features: the cost of a step does not depend on their values."""
    spec: FeatureSpec = feature_spec(recipe)
    generator, dtype = torch.Generator().manual_seed(0), row_dtype(spec.stored_dtype)
    rows = [
        TextRow(
            document.doc_id,
            document.input_ids,
            document.loss_mask,
            torch.randn(len(document.input_ids), spec.hidden_size, generator=generator).to(dtype),
            torch.randn(len(document.input_ids), spec.auxiliary, spec.hidden_size, generator=generator).to(dtype)
            if spec.auxiliary
            else None,
        )
        for document in random_documents(recipe, shape)
    ]
    write_features(recipe.paths.features, spec, {"train": [rows]})


@dataclass(frozen=True)
class CheckSettings:
    """The folder, the target's shape and the time limit of a part."""

    folder: Path
    shape_name: str
    seconds: float  # time limit of the part

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def half_dtype(self) -> str:
        """Return the half-precision dtype that this device supports."""
        return "bfloat16" if native_dtypes()["bfloat16"] else "float16"

    @property
    def compiler(self) -> dict[str, str]:
        """Return the arguments of `Target.compile`: on a CPU only its front end, which requires no C compiler."""
        return {"backend": "eager" if device() == "cpu" else "inductor"}

    def recipe(self) -> Recipe:
        """Return the recipe of the random target, whose folder is written on the first call."""
        folder = self.folder / "target"
        if not folder.exists():
            begun = self.folder / "target.begun"
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir()
            save_random_target(begun, self.shape, self.half_dtype)
            begun.rename(folder)
        return self.recipe_of(folder)

    def recipe_of(self, target: Path, *overrides: str) -> Recipe:
        """Return the 8B recipe for another target, on one GPU; `overrides` as after --set."""
        assignments = [f"target.model={target}", f"target.device={device()}", f"output={self.folder / 'run'}"]
        assignments += [
            f"{key}={self.half_dtype}" for key in ("target.dtype", "eval.dtype", "train.dtype", "features.stored_dtype")
        ]
        assignments += ["features.workers=1", "train.ranks=1", "train.warmup_steps=0", "train.epochs=50"]
        return load_recipe(RECIPE, [*assignments, "data.source=none", *self.shape.overrides, *overrides])


def native_dtypes() -> dict[str, bool]:
    """Return, for each half-precision dtype, whether the device supports it natively, without emulation."""
    if device() == "cpu":
        return {"bfloat16": True, "float16": True}
    return {
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        "float16": torch.cuda.get_device_capability() >= (5, 3),
    }


def new_methods(
    recipe: Recipe, target: Target, weights: dict[str, dict[str, torch.Tensor]] | None = None
) -> dict[str, LoadedMethod]:
    """Return the recipe's methods, bound to the target and in its dtype, with `weights` or random ones."""
    methods: dict[str, LoadedMethod] = {}
    embed_head = EmbeddingAndHead(target.embedding_VD, target.head, "random")
    for name, config in recipe.draft.items():
        draft = build(config, draft_shapes(target.config))
        draft.initialise(recipe.seed)
        if weights:
            draft.load_state_dict(weights[name])
        draft.to(target.device, target.dtype).bind(embed_head)
        methods[name] = LoadedMethod(draft, recipe.tree(name))
    return methods
