"""Check 4: will what the step writes fit where it writes it? Space, inodes, quota, and no tmpfs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import List, Optional, Tuple

from remote_jobs.agent import jobdir
from remote_jobs.agent.checks import data, model
from remote_jobs.agent.checks.context import FAIL, GIB, OK, SKIP, WARN, Row, Step, gib, row, worst

EXTRACT_SLACK = 1.1
EXTRACT_RESERVE_BYTES = 2 * GIB
EXTRACT_RESERVE_SHARE = 0.02
"""What an extraction leaves free without `min_free_gib` (remote_jobs/steps/extraction/disk.py): the smaller of the two."""
FILES_PER_SAMPLE = 1
ROOT_MIN_BYTES = 1 * GIB
OPTIMIZER_BYTES_PER_PARAMETER = 8
"""Two fp32 moments; the weights themselves are saved as bf16."""
QUOTA_TIMEOUT_S = 3.0
_BLOCK = 1024


@dataclass
class Target:
    """Where something is written: the nearest folder that exists, and its file system."""

    path: str
    existing: str
    fs: str
    memory: bool
    free_bytes: int
    free_inodes: Optional[int]
    quota_left: Optional[int] = None
    size_bytes: int = 0


@dataclass
class Writes:
    """What a step will write: bytes and files, how that was reckoned, and the bytes that it leaves free beside them."""

    bytes: float
    files: int
    how: str
    sure: bool = True
    reserve: float = 0.0

    @property
    def beside(self) -> str:
        """Words for the reserve, behind those for what is written."""
        return " and {} to stay free (min_free_gib)".format(gib(self.reserve)) if self.reserve else ""


def check(step: Step, shelf: model.Shelf, scans: data.Scans) -> Optional[Row]:
    """The verdict on one step's target; None for steps that write nothing worth checking."""
    writes = reckon(step, shelf, scans)
    if writes is None:
        return None
    target = read_target(step.output)
    if step.uses == "extract":
        default = min(EXTRACT_RESERVE_BYTES, int(target.size_bytes * EXTRACT_RESERVE_SHARE))
        writes.reserve = step.number("min_free_gib", default / GIB) * GIB
    already = bytes_there(step.output) if step.uses == "extract" else 0
    found = judge(target, writes, already, allow_tmpfs=step.job.spec.allow_tmpfs)
    storage = _shared_storage(step)
    if storage is not None:
        other = read_target(storage)
        if _device(other.existing) != _device(target.existing):
            text = "shared_storage_path {} and output {} lie on different file systems: every file is copied, not renamed"
            found.append(
                row(
                    FAIL,
                    text.format(storage, step.output),
                    "set shared_storage_path to a folder beside the output",
                )
            )
    text = "{} needed ({}){}, {} free in {}".format(
        gib(max(0.0, writes.bytes - already)), writes.how, writes.beside, gib(target.free_bytes), target.existing
    )
    return worst(found, text) if found else row(OK, text)


def check_root(step_root: str, *, log_limit_bytes: int, allow_tmpfs: bool) -> Row:
    """The verdict on orch's own root: logs and records."""
    target = read_target(step_root)
    writes = Writes(float(ROOT_MIN_BYTES), 1000, "logs and records")
    found = judge(target, writes, 0, allow_tmpfs=allow_tmpfs)
    if not found and target.free_bytes < log_limit_bytes:
        text = "{} has {} free, log_limit allows {}".format(
            target.existing, gib(target.free_bytes), gib(log_limit_bytes)
        )
        found.append(row(WARN, text, "free space, or lower log_limit"))
    text = "root {} ({}): {} free".format(step_root, target.fs, gib(target.free_bytes))
    return worst(found, text) if found else row(OK, text)


def judge(target: Target, writes: Writes, already: float, *, allow_tmpfs: bool) -> List[Row]:
    """Verdicts from numbers alone; empty means that all is well."""
    found = []
    if target.memory and not allow_tmpfs:
        found.append(row(FAIL, "{} lies in memory ({}): it is gone after a reboot and takes the host's RAM".format(
            target.path, target.fs), "use a folder on a disk, or `allow_tmpfs: true`"))  # fmt: skip
    need = max(0.0, writes.bytes - already)
    left, why, reserve, beside = float(target.free_bytes), "free", writes.reserve, writes.beside
    if target.quota_left is not None and target.quota_left < left - reserve:
        # The step keeps its reserve of the disk, whatever a quota says.
        left, why, reserve, beside = target.quota_left, "left of your quota", 0.0, ""
    is_asked = need > 0 or not already  # of the disk; nothing, when all is there already
    if is_asked and need > left - reserve:
        text = "{} will be written ({}){}, {} are {} in {}".format(
            gib(need), writes.how, beside, gib(left), why, target.existing
        )
        fix = "free {}, or set `output` to a larger disk, or lower samples".format(gib(need - left + reserve))
        # How much is written may be a guess; that nothing can be written is none.
        sure = writes.sure or reserve > left
        found.append(row(FAIL if sure else WARN, text, fix + (" or min_free_gib" if reserve else "")))
    elif is_asked and need > 0.9 * (left - reserve):
        text = "{} of {} {} in {} will be taken ({}){}".format(
            gib(need), gib(left), why, target.existing, writes.how, beside
        )
        found.append(row(WARN, text, "free some space first"))
    if target.free_inodes is not None and writes.files > target.free_inodes:
        text = "{} files will be written, {} inodes are free in {}".format(
            writes.files, target.free_inodes, target.existing
        )
        found.append(row(FAIL, text, "remove small files there, or set `output` to another file system"))
    return found


def reckon(step: Step, shelf: model.Shelf, scans: data.Scans) -> Optional[Writes]:
    """Bytes and files that a built-in step writes."""
    if step.uses not in ("extract", "train"):
        return None
    config, problem = None, "the model's config is not there"
    located = model.locate(step)
    if located is not None and located.folder is not None:
        config, problem, _ = shelf.get(located.folder)
    if config is None or not config.hidden:
        return Writes(0.0, 0, problem or "hidden_size unknown", sure=False)
    return _extraction(step, config, scans) if step.uses == "extract" else _training(step, config)


def _extraction(step: Step, config: model.ModelConfig, scans: data.Scans) -> Writes:
    layers = step.params.get("layers")
    count = len(layers) if isinstance(layers, list) and layers else 4
    tokens, rows, how, sure = _tokens(step, config, scans)
    width = 4 if str(step.params.get("dtype")) in ("float32", "float") else 2
    size = tokens * count * (config.hidden or 0) * width * EXTRACT_SLACK
    how = "{} x {} layers x {} x {} bytes x {}".format(how, count, config.hidden, width, EXTRACT_SLACK)
    return Writes(size, rows * FILES_PER_SAMPLE + 10, how, sure)


def _tokens(step: Step, config: model.ModelConfig, scans: data.Scans) -> Tuple[int, int, str, bool]:
    path = data.dataset_path(step)
    samples = data.samples_of(step)
    if path is not None and os.path.isfile(path):
        try:
            scan = scans.get(path, samples, tokenized=True)
            return scan.estimated_tokens, scan.estimated_rows, "{} tokens".format(scan.estimated_tokens), True
        except OSError:
            pass
    maker = next((s for s in step.job.steps if path is not None and s.name == step.maker_of(path)), None)
    rows = samples or (data.samples_of(maker) if maker is not None else None) or 0
    length = int(step.number("max_model_len", min(config.max_positions or 4096, 4096)))
    if maker is not None and maker.params.get("max_tokens"):
        length = min(length, 512 + int(maker.number("max_tokens", length)))
    return rows * length, rows, "at most {} samples x {} tokens".format(rows, length), False


def _training(step: Step, config: model.ModelConfig) -> Writes:
    hidden, vocab = config.hidden or 0, int(step.number("draft_vocab_size", 32000))
    intermediate = config.intermediate or 4 * hidden
    layer = 6 * hidden * hidden + 3 * hidden * intermediate
    parameters = int(step.number("num_layers", 1)) * layer + 3 * hidden * hidden + hidden * vocab
    embedding = hidden * (config.vocab or 0)
    each = (parameters + embedding) * 2 + parameters * OPTIMIZER_BYTES_PER_PARAMETER
    epochs = step.number("epochs", 1)
    frequency = step.number("checkpoint_freq", 1.0)
    count = max(1, int(epochs / frequency if 0 < frequency < 1 else epochs / max(1.0, frequency)))
    return Writes(
        float(each) * count, 20 * count, "{} checkpoints of about {}".format(count, gib(each)), sure=False
    )


def _shared_storage(step: Step) -> Optional[str]:
    value = step.params.get("shared_storage_path")
    return step.path(value) if isinstance(value, str) and value else None


# ---------------------------------------------------------------------------------------------------------- the edge


def read_target(path: str) -> Target:
    """The file system that a path will lie on; the path itself need not exist."""
    existing = os.path.abspath(path)
    while not os.path.exists(existing) and existing != "/":
        existing = os.path.dirname(existing)
    stat = os.statvfs(existing)
    fs = jobdir.fs_type(existing)
    inodes = stat.f_favail if stat.f_files > 0 else None
    return Target(
        path,
        existing,
        fs,
        jobdir.is_memory_fs(existing),
        stat.f_bavail * stat.f_frsize,
        inodes,
        quota_left(existing),
        stat.f_blocks * stat.f_frsize,
    )


def bytes_there(folder: str) -> int:
    """Size of the samples that an earlier run has written."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".safetensors"):
                    total += entry.stat().st_size
    except OSError:
        pass
    return total


def _device(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1


def quota_left(path: str) -> Optional[int]:
    """Bytes left of this user's quota on the path's file system, None where no quota is visible."""
    program = shutil.which("quota")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-w", "-p"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=QUOTA_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_quota(done.stdout.decode("utf-8", "replace"), _mounted_device(path))


def parse_quota(text: str, device: Optional[str]) -> Optional[int]:
    """Bytes left by `quota -w -p` for a device: `device blocks[*] soft hard ...` in KiB; 0 means no limit."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[0] == device:
            numbers = [int(re.sub(r"\D", "", field) or 0) for field in fields[1:4]]
            limit = numbers[2] or numbers[1]
            return max(0, limit - numbers[0]) * _BLOCK if limit else None
    return None


def _mounted_device(path: str) -> Optional[str]:
    best, device = -1, None
    real = os.path.realpath(path)
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields = line.split()
                mount = fields[1]
                if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= best:
                    best, device = len(mount), fields[0]
    except (OSError, IndexError):
        return None
    return device


__all__ = [
    "SKIP",
    "Target",
    "Writes",
    "check",
    "check_root",
    "judge",
    "parse_quota",
    "quota_left",
    "read_target",
    "reckon",
]
