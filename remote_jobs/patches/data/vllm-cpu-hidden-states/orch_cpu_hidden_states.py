"""Hidden-states connector for vLLM's CPU build: the stock one copies through CUDA streams and pinned memory.

Only the copy differs: the states are already in host memory, so they are cloned at once and handed to the stock writer
threads with an event that has already happened. Locks, file format and bookkeeping are the stock connector's.
"""

import fcntl
import os
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Happened:
    """Stands in for the CUDA event of a copy that was finished before it was recorded."""

    def query(self) -> bool:
        """The copy is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CPUHiddenStatesConnector(ExampleHiddenStatesConnector):
    """ExampleHiddenStatesConnector without CUDA."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size, dtype=torch.long)
        slots = (offsets.reshape(1, -1) + blocks.reshape(-1, 1) * self._block_size).flatten()
        # clone: the blocks are given back to the scheduler as soon as the event says that the copy is done.
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).clone()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        if lock_fd is None and self.use_lock:
            lock_fd = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        event = Happened()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, lock_fd)
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
