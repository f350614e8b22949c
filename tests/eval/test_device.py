"""A run's commands on a make-believe accelerator (tests/strict.py): capture, gate, and a release's own code."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.measure.harness import EvalTask, Harness, pool_outcomes
from eval.measure.prompts import BenchmarkPrompt
from pipeline.artifacts.features import feature_spec
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig
from pipeline.decoding.generate import Sampling, decode_speculative
from pipeline.lm.attention import GROUPED
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from pipeline.lm.verifier import rounding_bound
from pipeline.recipe.recipe import Recipe
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import EncodedDocument, FeatureWorker
from tests.kit import recipe_tree, write_sharegpt
from tests.pipeline import families
from tests.pipeline.taught import NEVER, VARIANTS, greedy, grown, make_draft, prompt_of
from tests.pipeline.test_drop_in import released
from tests.strict import DEVICE, Strict, rehearsal

FAMILIES = ["llama-3.1", "qwen2, sliding", "gemma-3", "gemma-2, soft caps", "gpt-oss"]  # of each kind of attention one

EAGER = FAMILIES[-2:]  # soft caps, sinks: transformers has no other attention for them


def on_the_device(config: TargetConfig) -> Target:
    """Load the target as "auto" does on a machine with an accelerator."""
    target = Target(config.model_copy(update={"device": "auto"}), "float32")
    assert target.device == DEVICE and isinstance(target.embedding_VD, Strict)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_attention_decodes_there_what_it_decodes_on_the_cpu(tmp_path, monkeypatch, family):
    config = families.save(tmp_path, family)
    cpu_target, sampling = Target(config, "float32"), Sampling(12, NEVER)
    for name in ("eagle", "eagle3"):
        tree = {"depth": 3, "top_k": 3, "nodes": 10}
        method = grown(make_draft(cpu_target, cpu_target.embed_head("here"), VARIANTS[name]), **tree)
        want = decode_speculative(cpu_target, method, prompt_of(3), sampling)
        assert want.tokens == greedy(cpu_target, prompt_of(3), 12)
        with rehearsal(), monkeypatch.context() as changed:
            changed.delenv("TRANSFORMERS_SDPA_FORCE_GQA")  # is of processes without an accelerator
            changed.setattr("transformers.integrations.sdpa_attention.repeat_kv", None)  # copies keys and values
            device_target = on_the_device(config)
            assert device_target.model.config._attn_implementation == ("eager" if family in EAGER else GROUPED)
            method.draft.to(DEVICE).bind(device_target.embed_head("there"))
            got = decode_speculative(device_target, method, prompt_of(3), sampling)
        assert (got.tokens, got.acceptance) == (want.tokens, want.acceptance)


@pytest.mark.parametrize("stored_dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_what_the_dump_captures_there_has_the_cpus_bytes(tiny_target, tmp_path, stored_dtype):
    def written(device: str) -> bytes:
        tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / device)
        tree["target"]["device"] = device
        tree["features"] |= {"stored_dtype": stored_dtype, "auxiliary_layers": [1, 2], "batch_tokens": 64}
        recipe = Recipe.model_validate(tree)
        documents = [
            EncodedDocument(f"d{n}", np.array(prompt_of(n, 5 + 3 * n), np.int32), np.ones(5 + 3 * n, np.uint8))
            for n in range(5)
        ]
        spec = feature_spec(recipe)
        worker = FeatureWorker(recipe, tmp_path / device, spec)
        worker.ready()
        waits.clear()
        record = worker.work(ShardTask("train", 0, documents))
        assert record.rows == 5
        return (tmp_path / device / record.name).read_bytes()

    waits: Counter = Counter()
    want = written("cpu")
    with rehearsal() as device_log:
        waits = device_log.waits
        assert written("auto") == want
    by_kind: Counter = Counter()
    for (kind, _), count in device_log.waits.items():
        by_kind[kind] += count
    # A batch is waited for where it has to be there; and transformers asks of each whether its rows are packed.
    assert by_kind == {"an event": 2, "is_nonzero": 2}


def test_the_gate_passes_there_and_float32_is_judged_by_plain_decodings_drift(tiny_recipe, embed_head, loaded_target):
    assert rounding_bound(torch.float32, torch.device("cpu")) == 0 < rounding_bound(torch.float32, DEVICE)
    with rehearsal():
        device_target = on_the_device(tiny_recipe.target)
        draft = make_draft(loaded_target, embed_head, VARIANTS["jakiro"]).to(DEVICE)
        draft.bind(device_target.embed_head("there"))
        methods = {
            "best": grown(draft, depth=3, top_k=3, nodes=7),
            "drawn": LoadedMethod(draft, TreeConfig(paths="eagle-1", siblings="drawn")),
        }
        made = Harness(tiny_recipe, device_target, methods)
        prompt = BenchmarkPrompt("one", "", ("Why? Because of that?",))
        _, gates, _ = pool_outcomes([("bench", made.decode(EvalTask("bench", prompt, t))) for t in (0.0, 1.0)])
    assert len(gates) == 4 and all(gate.passed and gate.checked == 1 for gate in gates.values())
    assert all(gate.rounds for gate in gates.values())  # looked at closely in float32 and greedily, too


def test_a_releases_own_code_decodes_there(loaded_target, embed_head, tiny_recipe, tiny_target, tmp_path, monkeypatch):
    """transformers' `generate` with `custom_generate`: the same tokens as its plain decoding."""
    draft = make_draft(loaded_target, embed_head, VARIANTS["jakiro"])
    tree = TreeConfig(depth=3, top_k=3, nodes=7, parallel=2)
    release = released(tmp_path, tiny_recipe, draft, Method(draft="jakiro", tree=tree))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    ids = torch.tensor([prompt_of(3)])
    with rehearsal():
        model = AutoModelForCausalLM.from_pretrained(tiny_target, device_map={"": DEVICE})
        ids, more = ids.to(DEVICE), {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
        plainly = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
        drafted = model.generate(
            ids, attention_mask=torch.ones_like(ids), custom_generate=str(release), trust_remote_code=True, **more
        )
        assert isinstance(drafted, Strict) and drafted.tolist() == plainly.tolist()
    assert plainly.raw[0, 12:].tolist() == greedy(loaded_target, prompt_of(3), 12)
