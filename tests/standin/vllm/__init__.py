"""A stand-in for vLLM: as much of its interface as `vllm_jakiro.engine` uses, over transformers on a CPU. Like vLLM it
hands over states one step after a request has finished, and its last layer's are not normed.

`FAULT` in the environment: in its third step it "dies" (is killed), "hangs", or is "crowded" (has no memory left);
"memory": there is none when it loads; "disk" has every file fail; "other" has the target compute something else; "slow"
takes time for a step; "text" has it say another third token where it captures. "dies 7", "hangs 7": in a step with a
text that holds token 7; "dies 7 1": once, whichever engine. In the folder `STANDIN` each engine leaves its process and
its folder, and a mark when it has such a fault.
"""

import ctypes
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm_jakiro import files
from vllm_jakiro.convert import Conversion, to_host

__version__ = "0.0.0"


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


class Refused(Exception):
    """An error like vLLM's own, which is no ValueError."""


class SamplingParams(SimpleNamespace):
    pass


class TokensPrompt(dict):
    pass


class EngineArgs(SimpleNamespace):
    def __init__(self, **options: Any):
        super().__init__(**({"max_model_len": None} | options))


class LLMEngine:
    def __init__(self, args: EngineArgs):
        self._fault, self._token, self._times = (*os.environ["FAULT"].split(), "", "", "")[:3]
        self._steps, self._shared_folder = 0, Path(os.environ["STANDIN"])
        if self._fault == "memory":
            raise RuntimeError("CUDA out of memory")
        if self._fault == "disk":
            files.save_file = full
        self._model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
        longest = args.max_model_len or self._model.config.max_position_embeddings
        self.model_config = SimpleNamespace(max_model_len=longest)
        self._layers = args.speculative_config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        connector_config = args.kv_transfer_config["kv_connector_extra_config"]
        self._folder = Path(connector_config["shared_storage_path"])
        self._conversion = Conversion.load(connector_config["capture"], torch.device("cpu"))
        (self._shared_folder / "engines" / str(os.getpid())).write_text(str(self._folder))
        self._open: dict[str, tuple[list[int], list[int], Any]] = {}
        self._finished: list[tuple[list[int], int, dict[str, Any]]] = []

    from_engine_args = classmethod(lambda cls, args: cls(args))

    def add_request(self, name: str, prompt: TokensPrompt, sampling: SamplingParams) -> None:
        if len(prompt["prompt_token_ids"]) >= self.model_config.max_model_len:
            raise Refused("the prompt is longer than the maximum model length")
        self._open[name] = list(prompt["prompt_token_ids"]), [], sampling

    def step(self) -> list[Any]:
        """A token of every request."""
        self._steps += 1
        if self._strikes("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes("crowded"):
            raise RuntimeError("CUDA out of memory")
        if self._fault == "slow":
            time.sleep(0.2)
        if self._strikes("hangs"):
            ctypes.PyDLL(None).sleep(1000)  # no other thread of Python's runs meanwhile
        for tokens, rows, request in self._finished:
            self._capture(tokens, rows, request)
        self._finished, done = [], []
        for name, (prompt, answer, sampling) in list(self._open.items()):
            answer.append(int(self._model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
            if self._fault == "text" and len(answer) == 3 and hasattr(sampling, "extra_args"):
                answer[-1] = answer[-1] % 100 + 1
            finished = len(answer) == sampling.max_tokens or answer[-1] in getattr(sampling, "stop_token_ids", ())
            done.append(
                SimpleNamespace(request_id=name, finished=finished, outputs=[SimpleNamespace(token_ids=answer)])
            )
            if finished:
                del self._open[name]
                if request := getattr(sampling, "extra_args", {}).get("kv_transfer_params"):
                    text = prompt if request["states"] == "prompt" else prompt + answer
                    tokens = text if request["states"] == "prompt" else text[:-1]
                    self._finished.append((tokens, len(text), request))
        return done

    def _strikes(self, fault: str) -> bool:
        if self._fault != fault:
            return False
        if self._token:
            due = any(int(self._token) in prompt for prompt, _, _ in self._open.values())
            due = due and len(list(self._shared_folder.glob(f"{fault}-*"))) < int(self._times or 9)
        else:
            due = self._steps > 3
        if due:
            (self._shared_folder / f"{fault}-{os.getpid()}").touch()
        return due

    @torch.inference_mode()
    def _capture(self, tokens: list[int], rows: int, request: dict[str, Any]) -> None:
        outputs: dict[int, torch.Tensor] = {}
        decoder = self._model.get_decoder()
        hooks = [
            decoder.layers[layer - 1].register_forward_hook(
                lambda _m, _i, out, layer=layer: outputs.update({layer: out if torch.is_tensor(out) else out[0]})
            )
            for layer in self._layers
        ]
        self._model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        states = torch.stack([outputs[layer][0] for layer in self._layers], dim=1)
        states = states.flip(0) if self._fault == "other" else states
        states = self._conversion.convert(states, rows, request["float8"])
        files.write(self._folder / request["file"], lambda: to_host(states))
