"""A vLLM connector that writes the states which the target computed for a request: one file for each request.

vLLM's speculative method "extract_hidden_states" keeps outputs of chosen decoder layers next to its keys and values.
Its own connector, the base of this one, is a debugging aid: it requires CUDA, locks files, and reports no error if a
file could not be written. Here a request's states are converted (convert.py) and copied while the next step runs (on a
GPU in their own stream, into pinned memory) and written by a thread (files.py).

A request's wishes are in `SamplingParams.extra_args["kv_transfer_params"]`: {"states": "prompt"} or "all", prompt and
answer, "float8", and its "file": vLLM adds to a request's own name. Without these the request has no file.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
    extract_from_kv_cache,
)

from vllm_jakiro.convert import Conversion, to_host
from vllm_jakiro.files import error_path, write

WRITERS = 4  # threads


@dataclass
class FileRequest(PendingSave):
    """A finished request whose file is to be written."""

    rows: int = 0  # tokens of the file; those after the computed ones are 0
    float8: bool = False


class StatesConnector(ExampleHiddenStatesConnector):
    """The connector's scheduler side names the finished requests; the worker of tensor-parallel rank 0 writes them.

    It relies on vLLM 0.32.0: the states of a step's tokens are in the cache before the next step requests a copy; a
    request keeps its blocks until `get_finished` returns it, which only one rank has to do (`get_finished_count`); a
    producer's preempted request is computed again, even if its last token is on its way (`requires_kv_delivery`); every
    rank has the full states, and no text is so long that a step leaves them out.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._executor.shutdown()
        self._executor = ThreadPoolExecutor(WRITERS, thread_name_prefix="states")
        self._copied: dict[str, Any] = {}  # request -> the event after which its states have left the cache; or None
        self._conversion: Conversion | None = None  # on the worker

    # -- scheduler ------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return (whether the request's blocks are kept until the copy is done, None)."""
        capture = request.kv_transfer_params or {}
        if self._request_filenames.pop(request.request_id, None) is None or "states" not in capture:
            return False, None
        # Nothing was computed after an answer's last token.
        text = request.prompt_token_ids if capture["states"] == "prompt" else list(request.all_token_ids)
        tokens = text if capture["states"] == "prompt" else text[:-1]
        path = Path(self._storage_path) / Path(capture["file"]).name
        if request.num_computed_tokens < len(
            tokens
        ):  # aborted, or without blocks: other requests' states would be read
            error_path(path).write_text(f"{request.num_computed_tokens} of {len(tokens)} tokens were computed")
            return False, None
        self._pending_saves[request.request_id] = FileRequest(
            request.request_id, str(path), torch.tensor(tokens), list(block_ids), len(text), capture["float8"]
        )
        return True, None

    # -- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            settings = self._kv_transfer_config.get_from_extra_config("capture", None)
            self._conversion = Conversion.load(settings, self._kv_cache.device)

    def wait_for_save(self) -> None:
        """Do nothing: there are no lock files."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks may be freed."""
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            if isinstance(metadata, ExampleHiddenStatesConnectorMetadata):
                for pending in metadata.pending_saves:
                    self._submit_async_write(pending)
        done = {name for name, copy in self._copied.items() if copy is None or copy.query()}
        for name in done:
            del self._copied[name]
        return done or None, None

    def _submit_async_write(self, pending: FileRequest) -> None:
        if not self._is_tp_rank_zero:
            return
        cache, size, conversion = self._kv_cache, self._block_size, self._conversion
        assert cache is not None and conversion is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[: len(pending.token_ids)]
        path, event = Path(pending.filename), None
        if cache.is_cuda:
            ready, stream = torch.cuda.Event(), self._get_copy_stream()
            ready.record()
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                raw_TSD = extract_from_kv_cache(cache, slots.to(cache.device, non_blocking=True), len(slots))
                copy = to_host(conversion.convert(raw_TSD, pending.rows, pending.float8))
            event = copy[1]
            self._executor.submit(write, path, lambda: copy)
        else:
            raw_TSD = extract_from_kv_cache(cache, slots, len(slots))  # a copy, which the writer converts
            convert = partial(conversion.convert, raw_TSD, pending.rows, pending.float8)
            self._executor.submit(write, path, lambda: to_host(convert()))
        self._copied[pending.req_id] = event
