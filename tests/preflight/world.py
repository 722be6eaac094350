"""A small sound world for preflight: a sharded checkpoint, a dataset, an environment of packages, idle GPUs, a plan.

`World.plant` breaks one thing of it, as described by data (faults.json). Built with the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from tests.gate.smi import FakeSmi

LAYERS, HIDDEN, VOCAB, SHARDS = 4, 64, 256, 4
SITE = {
    "vllm": "0.26.0",
    "torch": "2.11.0",
    "transformers": "5.4.0",
    "speculators": "0.9.0",
    "safetensors": "0.8.0",
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def write_shard(
    path: Path, tensors: dict[str, list[int]], dtype: str = "BF16", *, fill: bytes = b"\0"
) -> None:
    """A real safetensors file with these tensors."""
    width = {"BF16": 2, "I32": 4, "F32": 4}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = width
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + fill * at)


def write_checkpoint(folder: Path, *, shards: int = SHARDS, layers: int = LAYERS, config: dict[str, Any] | None = None,
                     per_layer: int = 6) -> None:  # fmt: skip
    """A sharded checkpoint with index, config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    (folder / "tokenizer_config.json").write_text("{}")
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [
        f"model.layers.{layer}.mlp.part{part}.weight" for layer in range(layers) for part in range(per_layer)
    ]
    weight_map = {
        name: f"model-{1 + n % shards:05d}-of-{shards:05d}.safetensors" for n, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        write_shard(folder / file, {name: [8, HIDDEN] for name, place in weight_map.items() if place == file})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class World:
    """Everything below one folder; `request()` is what the controller would send."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workdir = folder / "work"
        self.model = folder / "model"
        self.root = folder / "root"
        self.site = folder / "site"
        for path in (self.workdir, self.root):
            path.mkdir(parents=True)
        write_checkpoint(self.model)
        rows = [{"id": f"s{n}", "input_ids": list(range(n, n + 24)), "loss_mask": [1] * 24} for n in range(8)]
        (self.workdir / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.packages(SITE, cuda="13.0")
        self.smi = FakeSmi(folder / "bin")
        self.env: dict[str, str] = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "LC_ALL": "C.UTF-8"}
        self.facts: dict[str, Any] = {"root": str(self.root)}
        self.listeners: list[socket.socket] = []
        common = {"model": str(self.model), "tensor_parallel_size": 2}
        self.spec: dict[str, Any] = {
            "id": "job-1",
            "name": "plan",
            "host": "box",
            "workdir": str(self.workdir),
            "host_gpus": 2,
            "python": sys.executable,
            "env": {"PYTHONPATH": str(self.site)},
            "log_limit_bytes": 1024**2,
            "steps": [
                {"name": "serve", "uses": "serve", "gpus": 2, "params": {**common, "port": self.free_port()}, "patches": "auto"},
                {"name": "extract", "uses": "extract", "gpus": 2, "needs": ["serve"], "patches": "auto",
                 "params": {**common, "dataset": "data.jsonl", "layers": [1, 2, 4], "max_model_len": 64, "output": "out"}},
                {"name": "train", "uses": "train", "gpus": 2, "needs": ["extract"],
                 "params": {"model": str(self.model), "hidden_states": "out", "epochs": 1}},
            ],
        }  # fmt: skip

    def request(self) -> dict[str, Any]:
        """What `checks` reads on stdin."""
        return {"spec": self.spec, "facts": self.facts}

    def environment(self) -> dict[str, str]:
        """Variables of the host for this world, to be put before the command."""
        return {
            **self.env,
            "PATH": f"{self.smi.path}:{os.environ['PATH']}",
            "ORCH_NVIDIA_SMI": str(self.smi.path / "nvidia-smi"),
        }

    def close(self) -> None:
        """Give the ports back."""
        for listener in self.listeners:
            listener.close()

    @staticmethod
    def free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def packages(self, versions: dict[str, str], cuda: str | None) -> None:
        """Installed packages as the step's Python will find them: metadata, and torch's version file."""
        for name, version in versions.items():
            info = self.site / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        torch = self.site / "torch"
        torch.mkdir(exist_ok=True)
        (torch / "__init__.py").write_text("")
        (torch / "version.py").write_text(f"__version__ = 'x'\ncuda: Optional[str] = {cuda or None!r}\n")

    def step(self, name: str) -> dict[str, Any]:
        """A step of the plan."""
        return next(step for step in self.spec["steps"] if step["name"] == name)

    # ------------------------------------------------------------------------------------------------------- faults

    def plant(self, changes: list[dict[str, Any]]) -> None:
        """Break things: each change has one key, the name of a method below, and its arguments."""
        for change in changes:
            for name, arguments in change.items():
                getattr(self, "do_" + name)(*(arguments if isinstance(arguments, list) else [arguments]))

    def _at(self, path: str) -> Path:
        return self.folder / path

    def do_truncate(self, path: str, share: float) -> None:
        size = self._at(path).stat().st_size
        os.truncate(self._at(path), int(size * share))

    def do_append(self, path: str, text: str) -> None:
        with self._at(path).open("a") as file:
            file.write(text)

    def do_delete(self, path: str) -> None:
        self._at(path).unlink()

    def do_write(self, path: str, text: str) -> None:
        self._at(path).parent.mkdir(parents=True, exist_ok=True)
        self._at(path).write_text(text.replace("MODEL", str(self.model)))

    def do_lfs(self, path: str) -> None:
        self.do_write(path, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4974351816\n")

    def do_link(self, path: str, target: str) -> None:
        self._at(path).unlink(missing_ok=True)
        self._at(path).symlink_to(target)

    def do_json(self, path: str, changes: dict[str, Any]) -> None:
        record = json.loads(self._at(path).read_text())
        record.update(changes)
        self._at(path).write_text(json.dumps({k: v for k, v in record.items() if v is not None}))

    def do_shard(self, path: str, tensors: dict[str, list[int]]) -> None:
        write_shard(self._at(path), tensors)

    def do_param(self, step: str, key: str, value: Any) -> None:
        params = self.step(step)["params"]
        params[key] = value.replace("{folder}", str(self.folder)) if isinstance(value, str) else value

    def do_step(self, step: str, changes: dict[str, Any]) -> None:
        self.step(step).update(changes)

    def do_spec(self, changes: dict[str, Any]) -> None:
        text = json.dumps(changes).replace("{folder}", str(self.folder))
        self.spec.update(json.loads(text))

    def do_job_env(self, changes: dict[str, str]) -> None:
        self.spec["env"].update(changes)

    def do_host_env(self, changes: dict[str, str]) -> None:
        self.env.update(changes)

    def do_fact(self, changes: dict[str, Any]) -> None:
        self.facts.update(changes)

    def do_row(self, row: dict[str, Any]) -> None:
        if "repeat" in row:
            row = {"input_ids": [1] * row["repeat"]}
        self.do_append("work/data.jsonl", json.dumps(row) + "\n")

    def do_listen(self, step: str) -> None:
        listener = socket.socket()
        listener.bind(("0.0.0.0", self.step(step)["params"]["port"]))
        listener.listen()
        self.listeners.append(listener)

    def do_smi(self, changes: dict[str, Any]) -> None:
        self.smi.save(**changes)

    def do_hold(self, gpu: int, mib: int) -> None:
        self.smi.hold(gpu, os.getpid(), mib)

    def do_site(self, versions: dict[str, str | None], cuda: str | None = "13.0") -> None:
        for name in {**SITE, **versions}:
            for info in self.site.glob(f"{name}-*.dist-info"):
                (info / "METADATA").unlink()
                info.rmdir()
        self.packages({k: v for k, v in {**SITE, **versions}.items() if v is not None}, cuda)
