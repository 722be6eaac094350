"""One training process: speculators' own trainer with saving that survives a kill, exact stops, and a metrics file.

Started by train.py (alone, or by torchrun once per GPU) as `python -m remote_jobs.steps.train_worker FLAGS`; the flags are
those of `speculators train`. What is added to the trainer, and why:

* A checkpoint is never overwritten in place: speculators saves epoch E's later checkpoints over its earlier ones, so a
  kill while saving would leave nothing to resume from. The former one is kept aside until the new one is whole.
* A stop signal takes effect between two steps, on the same step in every rank, and the checkpoint it saves knows its
  step: speculators raises anywhere (ranks then hang in different collectives) and forgets where it was.
* Every logged record goes to metrics.jsonl as well, each step once, also after a resume.
* The fused losses are Triton kernels already; torch.compile is kept out of them, since Dynamo cannot trace their autotuner
  in every torch (2.11 fails). A compiler that fails before the first step all the same is noted for train.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from remote_jobs.steps import compiler_fallback
from remote_jobs.steps.checkpoints import FINISHED, INTERRUPTED, PREVIOUS, STATE, hold_lock, mark_complete
from remote_jobs.steps.extraction.progress import Progress

METRICS_ENV = "ORCH_TRAIN_METRICS"
MARK_EVERY_S = 1.0


class Stop:
    """A stop signal that waits for the next step boundary; a second one takes effect at once."""

    def __init__(self) -> None:
        self.asked = False
        self.deferred = True  # False where nothing can be torn apart: validation of a single process
        self.error: type[Exception] = RuntimeError
        self._group: Any = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        again, self.asked = self.asked, True
        if again or not self.deferred:
            raise self.error(signal.Signals(number).name)
        print(
            f"Received {signal.Signals(number).name}: saving a checkpoint after this step.",
            file=sys.stderr,
            flush=True,
        )

    def due(self) -> bool:
        """True when this step is the last one; every rank gets the same answer."""
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return self.asked
        if self._group is None:
            # Gloo, on the CPU: asking must not make the GPU wait.
            self._group = dist.new_group(backend="gloo")
        flag = torch.tensor([int(self.asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        self.asked = bool(flag.item())
        return self.asked


class Metrics:
    """Stands where the trainer's metric logger stands; writes every record to a file too, and marks progress."""

    def __init__(self, logger: Any, path: str, *, main: bool) -> None:
        self._logger = logger
        self._path = path
        self._main = main
        self._progress = Progress()
        self._marked = 0.0
        self.total_steps = 0
        self.stepped = False

    def resume_at(self, global_step: int) -> None:
        """Drop the records of steps that will be done again."""
        if not self._main or not os.path.exists(self._path):
            return
        with open(self._path, encoding="utf-8") as stream:
            lines = stream.readlines()
        kept = [line for line in lines if _step_of(line) < global_step]
        temporary = f"{self._path}.tmp.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.writelines(kept)
        os.replace(temporary, self._path)

    def info(self, record: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As logging.Logger.info."""
        self._logger.info(record, *args, **kwargs)
        if not self._main:
            return
        step = int(record.get("global_step", (kwargs.get("extra") or {}).get("step", 0)))
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **record}) + "\n")
        now = time.monotonic()
        if "train" in record and (now - self._marked >= MARK_EVERY_S or step + 1 == self.total_steps):
            self._marked = now
            loss = record["train"].get("loss")
            self._progress.mark("train", "progress", done=step + 1, total=self.total_steps, loss=loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


def _step_of(line: str) -> float:
    """Step of a record; a validation record belongs to the steps before it. A damaged line is dropped."""
    try:
        record = json.loads(line)
        return float(record["step"]) - (0 if "train" in record else 0.5)
    except (ValueError, KeyError, TypeError):
        return float("inf")


def keep_compiler_out_of_kernels() -> None:
    """Let Dynamo leave speculators' fused losses alone: it goes on behind each call, the kernels run as they are."""
    import torch

    if not torch.cuda.is_available():
        return  # nothing is compiled
    try:
        from speculators.losses import fused
    except ImportError:  # no Triton here; speculators says so itself when they are asked for
        return
    for name in [name for name in vars(fused) if name.startswith("fused_")]:
        setattr(fused, name, torch.compiler.disable(getattr(fused, name)))


def install(stop: Stop, metrics_path: str) -> Metrics:
    """Put the additions into speculators' trainer (0.9)."""
    import torch.distributed as dist
    from speculators.train import graceful_shutdown, trainer

    trainer_class = trainer.Trainer
    stop.error = graceful_shutdown.TrainingInterruptedError
    graceful_shutdown.GracefulShutdownHandler._handler = (  # noqa: SLF001
        lambda _self, number, frame: stop.handle(number, frame)
    )
    metrics = Metrics(trainer.metric_logger, metrics_path, main=int(os.environ.get("RANK", "0")) == 0)
    trainer.metric_logger = metrics

    original_setup = trainer_class.setup_trainer
    original_epoch = trainer_class.train_epoch
    original_validation = trainer_class.val_epoch
    original_save = trainer_class.maybe_save_checkpoint

    def setup_trainer(self: Any) -> None:
        original_setup(self)
        self.orch_position = (self.current_epoch - 1, 0)
        steps = len(self.train_loader)
        metrics.total_steps = steps * self.config.num_epochs
        # A checkpoint at an epoch's end stands before the step that its counter names.
        metrics.resume_at(self.global_step)

    def train_epoch(self: Any, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        first = getattr(self, "_resume_local_step", 0) if epoch == self.current_epoch else 0
        # Before its first step this run stands at the former epoch's end.
        self.orch_position = (epoch, first) if first else (epoch - 1, 0)

        def after_step() -> None:
            metrics.stepped = True
            self.orch_position = (epoch, self.orch_position[1] + 1)
            if step_callback is not None:
                step_callback()
            if stop.due():
                raise stop.error("SIGTERM")

        stop.deferred = True
        original_epoch(self, epoch, step_callback=after_step)
        self.orch_position = (epoch, 0)  # as in training_state.json: 0 is the end of the epoch

    def val_epoch(self: Any, epoch: int) -> Any:
        stop.deferred = bool(self.is_distributed)
        try:
            return original_validation(self, epoch)
        finally:
            stop.deferred = True

    def maybe_save_checkpoint(self: Any, epoch: int | str, local_step: int = 0) -> None:
        root: Path = self.checkpointer.path
        target, former = root / str(epoch), root / f"{PREVIOUS}{epoch}"
        main = not self.is_distributed or dist.get_rank() == 0
        if main and target.exists():
            shutil.rmtree(former, ignore_errors=True)
            target.rename(former)
        if self.is_distributed:
            dist.barrier()
        original_save(self, epoch, local_step)
        if main:
            if target.exists():
                at, step = self.orch_position
                if epoch == INTERRUPTED and at >= 0:
                    state = {"epoch": at, "local_step": step, "global_step": self.global_step}
                    (target / STATE).write_text(json.dumps(state))
                mark_complete(target)
                shutil.rmtree(former, ignore_errors=True)
            elif former.exists():  # the trainer chose not to save this time
                former.rename(target)
        if self.is_distributed:
            dist.barrier()
        if epoch != INTERRUPTED and not self.is_distributed and stop.asked:
            raise stop.error("SIGTERM")

    for function in (setup_trainer, train_epoch, val_epoch, maybe_save_checkpoint):
        setattr(trainer_class, function.__name__, function)
    return metrics


def main() -> int:
    """Train as the command line says; 0 also after a stop (train.py looks at what was reached)."""
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    stop = Stop()
    metrics = install(stop, os.environ[METRICS_ENV])
    keep_compiler_out_of_kernels()
    config = TrainConfig.resolve(sys.argv[1:])
    flat = config.flatten()
    main_rank = int(os.environ.get("RANK", "0")) == 0
    if main_rank and hold_lock(Path(flat["save_path"]), 0) is None:
        print("Another trainer writes to this folder.", file=sys.stderr)
        return 1
    try:
        train(config)
    except Exception as error:
        if not metrics.stepped and compiler_fallback.is_compiler_failure(error):
            compiler_fallback.note_failure(os.path.dirname(os.environ[METRICS_ENV]), error)
        raise
    if not stop.asked and main_rank:
        path = Path(flat["save_path"]) / FINISHED
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"epochs": flat["epochs"], "max_steps": flat.get("max_steps")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
