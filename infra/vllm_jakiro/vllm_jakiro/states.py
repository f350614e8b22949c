"""A vLLM connector that writes the states which the target computed for a request: one file for each request.

vLLM's speculative method "extract_hidden_states" keeps outputs of chosen decoder layers next to its keys and values.
Its own connector, the base of this one, is a debugging aid: it requires CUDA, locks files, and reports no error if a
file could not be written. Here a request's states are copied while the next step runs (on a GPU in their own stream,
into pinned memory) and written by a thread (files.py).

A request's wishes are in `SamplingParams.extra_args["kv_transfer_params"]`: {"states": "prompt"} or "all", prompt and
answer, and its "file": vLLM adds to a request's own name. Without these the request has no file.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
    extract_from_kv_cache,
)

from vllm_jakiro.files import error_path, write

WRITERS = 4  # threads


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

    # -- scheduler ------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return (whether the request's blocks are kept until the copy is done, None)."""
        capture = request.kv_transfer_params or {}
        if self._request_filenames.pop(request.request_id, None) is None or "states" not in capture:
            return False, None
        # Nothing was computed after an answer's last token.
        tokens = request.prompt_token_ids if capture["states"] == "prompt" else list(request.all_token_ids)[:-1]
        path = Path(self._storage_path) / Path(capture["file"]).name
        if request.num_computed_tokens < len(
            tokens
        ):  # aborted, or without blocks: other requests' states would be read
            error_path(path).write_text(f"{request.num_computed_tokens} of {len(tokens)} tokens were computed")
            return False, None
        self._pending_saves[request.request_id] = PendingSave(
            req_id=request.request_id, filename=str(path), token_ids=torch.tensor(tokens), block_ids=list(block_ids)
        )
        return True, None

    # -- worker ---------------------------------------------------------------------------------------------------

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

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        cache, size = self._kv_cache, self._block_size
        assert cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[: len(pending.token_ids)]
        event = None
        if cache.is_cuda:
            ready, stream = torch.cuda.Event(), self._get_copy_stream()
            ready.record()
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                gpu_states = extract_from_kv_cache(cache, slots.to(cache.device, non_blocking=True), len(slots))
                states = torch.empty_like(gpu_states, device="cpu", pin_memory=True)
                states.copy_(gpu_states, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
        else:
            states = extract_from_kv_cache(cache, slots, len(slots))  # a copy
        self._copied[pending.req_id] = event
        self._executor.submit(write, Path(pending.filename), states, pending.token_ids, event)
