"""A target's shape without the target: its configuration, random ends, a dump of random features. What it is for:

    python -m tests.train.shaped 8b FOLDER                    plan of infra/recipes/llama3-instruct-8b.toml, then one
                                                              real step of each of its drafts
    python -m tests.train.shaped 8b FOLDER --frame eagle-3    the same of the recipe on EAGLE-3's frame
    python -m tests.train.shaped 70b FOLDER                   the plan of the 70B recipe; --step for the steps, too

The folder takes 2 GB (4 GB for 70b), a step 10 to 13 GB of memory; in bfloat16 on the CPU.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from pipeline.artifacts.features import feature_spec
from pipeline.features.schema import Row
from pipeline.features.shards import SPLITS, write_features
from pipeline.recipe.load import load_recipe, override_arguments
from tests.kit import byte_tokenizer, run_command, train_command

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
SPEEDS = [
    "--dump-speed",
    "5000",
    "--train-speed",
    "30000",
    "--decode-ms",
    "20",
]  # the plan's hours are not what this is for


def save_shaped_target(folder: Path, shape: str) -> None:
    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"], bos_token_id=None, eos_token_id=256,
        **SHAPES[shape],
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    embed_head = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        embed_head[name] = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        embed_head[name].normal_(std=0.02, generator=generator)
    save_file(embed_head, folder / "model.safetensors")


def dump_random(recipe, dialogues: int, length: int) -> None:
    spec, generator = feature_spec(recipe), torch.Generator().manual_seed(1)
    rows = [
        Row(
            f"random-{number}",
            torch.randint(0, 128256, (length,), generator=generator).int().numpy(),
            (np.arange(length) >= length // 4).astype(np.uint8),
            torch.randn(length, spec.hidden_size, generator=generator).bfloat16(),
            torch.randn(length, spec.auxiliary, spec.hidden_size, generator=generator).bfloat16()
            if spec.auxiliary
            else None,
        )
        for number in range(dialogues)
    ]
    write_features(recipe.features_dir, spec, {split: [rows] for split in SPLITS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--frame", choices=["eagle", "eagle-3"], default="eagle")
    parser.add_argument("--step", action="store_true", help="also for 70b")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    arguments = parser.parse_args()
    room = Path("infra/recipes") / ("eagle-3" if arguments.frame == "eagle-3" else "")
    target, path = arguments.folder / "target", room / f"llama3-instruct-{arguments.shape}.toml"
    if not (target / "model.safetensors").exists():
        save_shaped_target(target, arguments.shape)
    sets = [f"target.model={target}", "data.source=embedded:sharegpt", *arguments.overrides]
    planned = [*sets, f"output={arguments.folder / 'plan'}"]
    done = run_command([sys.executable, "-m", "pipeline", "plan", str(path), *override_arguments(planned), *SPEEDS])
    print(done.stdout + done.stderr)
    if done.returncode or not (arguments.step or arguments.shape == "8b"):
        sys.exit(done.returncode)
    few = ["global_batch=1", "micro_batch=1", "epochs=1", "warmup_steps=0", "zero_stage=0", "verify_checksums=false"]
    sets += [f"output={arguments.folder / 'run'}", "target.device=cpu", *(f"train.{one}" for one in few)]
    recipe = load_recipe(path, [*sets, "features.gpus_per_worker=0"])
    dump_random(recipe, 1, 256)
    for draft in sorted(recipe.draft):
        done = run_command(train_command(path, *sets, "features.gpus_per_worker=0", draft=draft))
        lines = (recipe.draft_dir(draft) / "metrics.jsonl").read_text().splitlines() if done.returncode == 0 else []
        print("\n".join([line[:160] for line in lines] or [done.stdout[-2000:] + done.stderr[-2000:]]))
        print(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
