"""The one line of transformers beside its own ways of decoding, where nothing of this project is installed.

    python one_line.py RELEASE TARGET PROMPTS [--tokens 64]

infra/serving/in_transformers.py calls it. It needs torch, transformers and safetensors. PROMPTS is a JSON list of lists
of token ids. All ways answer each prompt greedily in float32, in turns: plain `generate()`, the release's draft, prompt
lookup, and an assistant, the first fifth of the target's own layers. The last line is JSON: on how many prompts the
answer is plain generate()'s, and seconds, the prompt's own forward included.
"""

import argparse
import importlib.util
import json
import time
from pathlib import Path

PLAIN, DRAFT = "plain `generate()`", "the release, by `custom_generate`"
OURS = ("ray", "deepspeed", "datasets", "pyarrow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    arguments = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    layers = max(1, model.config.num_hidden_layers // 5)
    ways = {
        PLAIN: {},
        DRAFT: {"custom_generate": str(arguments.release), "trust_remote_code": True},
        "prompt lookup, 3 tokens": {"prompt_lookup_num_tokens": 3},
        f"an assistant: the target's first {layers} layers": {"assistant_early_exit": layers},
    }
    seconds, same = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    prompts = json.loads(arguments.prompts.read_text())
    for number, ids in enumerate([prompts[0], *prompts]):  # the first one twice: it warms up
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        answers = {}
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            more = ways[name] | ({} if name == DRAFT else {"tokenizer": tokenizer})
            begin = time.perf_counter()
            answers[name] = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False, **more).tolist()
            seconds[name] += (time.perf_counter() - begin) * (number > 0)
        for name, answer in answers.items():
            same[name] += (answer == answers[PLAIN]) * (number > 0)
    found = {"prompts": len(prompts), "same": same, "seconds": {name: round(took, 2) for name, took in seconds.items()}}
    print(json.dumps(found | {"installed": [name for name in OURS if importlib.util.find_spec(name)]}))


if __name__ == "__main__":
    main()
