"""The train step: an EAGLE-3 draft with speculators, on any number of GPUs, resumed from its last whole checkpoint.

    python train.py --model FOLDER --dataset responses.jsonl --hidden-states STATES --vocab-map MAP --epochs 10 [...]

Every flag of `speculators train` passes through (--lr, --ttt-steps, --total-seq-len, --fsdp-shard, ...). Results in the
output folder: `checkpoints/<epoch>/`, `draft` (link to the last one: what vLLM serves), `metrics.jsonl` (one record a
step), `loss.png` where matplotlib is. Done means that the last epoch is complete; an exit status of 0 of the trainer says
nothing (it exits with 0 after a stop signal as well).
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remote_jobs.steps import checkpoints, compiler_fallback, curves, entry, trainer_process
from remote_jobs.steps.extraction.dataset import Row, prompts_sha256, read_dataset
from remote_jobs.steps.extraction.errors import ConfigError, DatasetError, IncompleteError, StepError
from remote_jobs.steps.extraction.merge import MANIFEST_NAME
from remote_jobs.steps.extraction.model import ModelFacts, read_model
from remote_jobs.steps.extraction.progress import Progress
from remote_jobs.steps.extraction.sample_file import write_atomically
from remote_jobs.steps.extraction.samples import Shape, output_folder, sample_path, valid_samples
from remote_jobs.steps.extraction.stop import StopSignal
from remote_jobs.steps.vocab_map import D2T, FACTS, T2D, check_map, file_sha256

CHECKPOINTS, DRAFT, METRICS, SETTINGS, PLOT = (
    "checkpoints",
    "draft",
    "metrics.jsonl",
    "train.json",
    "loss.png",
)
DEFAULT_EPOCHS = 20
DEFAULT_CHECKPOINT_FREQ = "0.25"
LISTS = frozenset({"--full-attention-indices"})
"""Flags of speculators that take several words; a plan's list arrives joined by commas."""
OURS = frozenset(
    {
        "--target-layer-ids",
        "--verifier-name-or-path",
        "--data-path",
        "--hidden-states-path",
        "--save-path",
        "--d2t-path",
    }
)
FORMER_LIMIT_S = 150.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; returns the exit status. The last line printed says why it failed."""
    return entry.run("train", lambda progress: train(*_parse(argv), progress))


def train(args: argparse.Namespace, flags: list[str], progress: Progress) -> int:
    """Check every input, prepare speculators' view of it, train, and judge by what is on the disk."""
    stop = StopSignal()
    with stop.installed(), output_folder(args.output) as folder:
        save_path = Path(folder, CHECKPOINTS)
        with progress.phase("load_config"), stop.raising():
            entry.put_patches_in_force(progress)
            model = read_model(args.model, args.revision)
            inputs = _inputs(args, model, progress)
            gpus = visible_gpus()
            processes = args.nproc_per_node or max(1, gpus)
            command = [*trainer_process.launcher(processes), *_flags(args, flags, inputs, folder, gpus=gpus)]
            _same_settings(folder, args, inputs, processes)
            _wait_for_former(save_path, progress)
            best, notes = checkpoints.recover(save_path)
            for note in notes:
                progress.say(f"Note: {note}")
        if finished(save_path, best, args.epochs):
            progress.say(f"All {args.epochs} epochs are there already.")
        else:
            where = f"epoch {best.epoch + 1}, step {best.global_step}" if best else "the beginning"
            progress.say(
                f"Training from {where} to {args.epochs} epochs in {processes} processes, {gpus or 'no'} GPUs: {' '.join(command)}"
            )
            with progress.phase("train"):
                _run(command, folder, stop, progress, fall_back=args.compiler_fallback)
                best, _ = checkpoints.recover(save_path)
                if not finished(save_path, best, args.epochs):
                    stop.check()
                    reached = f"epoch {best.epoch + 1}, step {best.global_step}" if best else "no checkpoint"
                    raise IncompleteError(
                        f"training ended with exit status 0 at {reached} of {args.epochs} epochs"
                    )
        draft = _link_draft(folder, save_path)
        curves.draw(os.path.join(folder, METRICS), os.path.join(folder, PLOT), progress)
        progress.mark("done", "done", done=args.epochs, total=args.epochs)
        progress.say(f"Done: {args.epochs} epochs; the draft to serve is {draft}")
    return 0


def _run(command: list[str], folder: str, stop: StopSignal, progress: Progress, *, fall_back: bool) -> None:
    """Run the trainer, by the next way when the compiler refuses it before its first step.

    Raises:
        Interrupted: stopped; the checkpoint is saved.
        StepError: the trainer failed.
    """
    while True:
        way = compiler_fallback.WAYS[compiler_fallback.way(folder) if fall_back else 0]
        if way.flags:
            progress.say(f"Note: training {way.what}; {folder}/{compiler_fallback.NAME} says why.")
        compiler_fallback.forget_failure(folder)
        try:
            changed = compiler_fallback.changed(command, way.flags)
            trainer_process.run(changed, os.path.join(folder, METRICS), way.env, stop)
            return
        except StepError:
            failed = compiler_fallback.next_way(folder) if fall_back else None
            if failed is None:
                raise
            progress.say(f"Note: the compiler refused speculators' training before the first step: {failed}")


def _wait_for_former(save_path: Path, progress: Progress) -> None:
    """A killed train.py leaves its trainer saving a last checkpoint: that one is worth waiting for.

    Raises:
        ConfigError: it does not end: somebody else trains here.
    """
    lock = checkpoints.hold_lock(save_path, 0)
    if lock is None:
        progress.say("A trainer of a former run is still saving; waiting for it.")
        lock = checkpoints.hold_lock(save_path, FORMER_LIMIT_S)
    if lock is None:
        raise ConfigError(
            f"another trainer is writing to {save_path}", hint="use another --output, or end it"
        )
    os.close(lock)


class Inputs:
    """What training reads, checked: rows, states, and the vocabulary map."""

    def __init__(
        self, rows: list[Row], states: str, manifest: dict[str, Any], dataset: str, vocab_map: str | None
    ) -> None:
        self.rows, self.states, self.manifest = rows, states, manifest
        self.dataset, self.dataset_sha256 = dataset, file_sha256(dataset)
        self.vocab_map = vocab_map
        self.map_facts: dict[str, Any] = {}


def _inputs(args: argparse.Namespace, model: ModelFacts, progress: Progress) -> Inputs:
    """Find and check every input.

    Raises:
        ConfigError, DatasetError, StepError: names what does not fit, and the step that makes it again.
    """
    manifest_path = entry.needed(MANIFEST_NAME, "--hidden-states", _inside(args.hidden_states, MANIFEST_NAME))
    try:
        manifest = entry.read_json(manifest_path)
    except FileNotFoundError:
        raise ConfigError(f"no {manifest_path}: --hidden-states takes the output folder of extract") from None
    states = os.path.dirname(os.path.abspath(manifest_path))
    if manifest["model_sha256"] != model.fingerprint:
        raise ConfigError(
            f"the states in {states} are of another model ({manifest['model']})", hint="run extract again"
        )
    layers, last = manifest["layer_ids"], model.num_hidden_layers
    if layers[-1] != last or len(layers) < 2:
        raise ConfigError(
            f"the states hold layer ids {layers}; training also needs the last layer's output, id {last}",
            hint=f"run extract with layers: {[*[k for k in layers if k != last], last]}",
        )
    dataset = entry.needed("responses.jsonl", "--dataset", args.dataset or _existing(manifest["dataset"]))
    rows = read_dataset(
        dataset,
        vocab_size=model.vocab_size,
        max_tokens=model.max_tokens,
        samples=manifest["samples"]["expected"],
    )
    if prompts_sha256(rows) != manifest["prompts_sha256"]:
        raise ConfigError(
            f"{dataset} is not what the states in {states} were made from", hint="run extract again"
        )
    shape = Shape(len(layers), manifest["hidden_size"], manifest["dtype"])
    valid, damaged = valid_samples(states, rows, shape)
    for path, reason in list(damaged.items())[:10]:
        progress.say(f"{path}: {reason}")
    missing = [row.index for row in rows if row.index not in valid]
    if missing:
        what = f"{len(damaged)} damaged, {len(missing) - len(damaged)} missing"
        first = next(iter(damaged.items()), None)
        raise StepError(
            f"Failed to load hidden states for sample {missing[0]}: {len(missing)} of {len(rows)} sample files cannot be used "
            f"({what}){f'; {first[0]}: {first[1]}' if first else ''}",
            hint="run the extract step again: it keeps the good files and makes these anew",
        )
    progress.say(
        f"{len(rows)} samples with states of layers {layers} ({manifest['dtype']}), every file checked"
    )
    inputs = Inputs(rows, states, manifest, dataset, None)
    if args.vocab_map != "none":
        given = _inside(args.vocab_map, FACTS)
        folder = os.path.dirname(entry.needed(FACTS, "--vocab-map", given))
        inputs.map_facts = check_map(folder, dataset_sha256=inputs.dataset_sha256, model=model)
        inputs.vocab_map = os.path.abspath(folder)
    return inputs


def _flags(
    args: argparse.Namespace, given: list[str], inputs: Inputs, folder: str, *, gpus: int
) -> list[str]:
    """Command line of speculators' trainer: ours, then what the user gave."""
    names = {word.split("=")[0] for word in given if word.startswith("--")}
    clash = sorted(names & OURS)
    if clash:
        raise ConfigError(f"{clash[0]} is set by train itself and cannot be given")
    data, states = _prepare(folder, inputs)
    layers = inputs.manifest["layer_ids"]
    ours: dict[str, list[str]] = {
        "--speculator-type": ["eagle3"],
        "--verifier-name-or-path": [os.path.abspath(args.model) if os.path.isdir(args.model) else args.model],
        "--data-path": [data],
        "--hidden-states-path": [states],
        # The last id is the verifier's final state, which speculators takes as the target and does not count.
        "--target-layer-ids": [str(layer) for layer in layers[:-1]],
        "--save-path": [os.path.join(folder, CHECKPOINTS)],
        "--epochs": [str(args.epochs)],
        "--checkpoint-freq": [DEFAULT_CHECKPOINT_FREQ],
        "--on-missing": ["raise"],
        "--hidden-states-dtype": [inputs.manifest["dtype"]],
        "--log-dir": [os.path.join(folder, "logs")],
    }
    if inputs.vocab_map:
        ours["--draft-vocab-size"] = [str(inputs.map_facts["draft_vocab_size"])]
        ours["--d2t-path"] = [os.path.join(inputs.vocab_map, D2T)]
        ours["--t2d-path"] = [os.path.join(inputs.vocab_map, T2D)]
    if not gpus:
        # Flex attention and the fused losses are CUDA kernels.
        ours |= {"--draft-attn-impl": ["eager"], "--loss-implementation": ["eager"], "--num-workers": ["0"]}
    command: list[str] = []
    for name, values in ours.items():
        if name not in names:
            command += [name, *values]
    for index, word in enumerate(given):
        follows = given[index - 1] if index else ""
        command += word.split(",") if follows in LISTS else [word]
    return command


def _prepare(folder: str, inputs: Inputs) -> tuple[str, str]:
    """Speculators' view of the data: an Arrow dataset, and hs_<i>.safetensors as links; made anew when inputs changed."""
    data, states = os.path.join(folder, "data"), os.path.join(folder, "hidden_states")
    stamp = os.path.join(folder, "data.sha256")
    wanted = f"{inputs.dataset_sha256} {inputs.manifest['prompts_sha256']} {len(inputs.rows)}"
    if not (os.path.isdir(data) and os.path.exists(stamp) and Path(stamp).read_text() == wanted):
        import shutil

        from datasets import Dataset

        shutil.rmtree(data, ignore_errors=True)
        masks = _masks(inputs)
        Dataset.from_generator(
            lambda: (
                {"input_ids": row.token_ids.tolist(), "loss_mask": mask, "seq_len": len(row.token_ids)}
                for row, mask in zip(inputs.rows, masks, strict=True)
            ),
            cache_dir=os.path.join(folder, ".cache"),
            keep_in_memory=False,
        ).with_format("torch").save_to_disk(data)
        shutil.rmtree(os.path.join(folder, ".cache"), ignore_errors=True)
        write_atomically(stamp, wanted.encode())
    os.makedirs(states, exist_ok=True)
    for name in os.listdir(states):
        os.unlink(os.path.join(states, name))
    for position, row in enumerate(inputs.rows):
        os.symlink(sample_path(inputs.states, row.index), os.path.join(states, f"hs_{position}.safetensors"))
    return data, states


def _masks(inputs: Inputs) -> list[list[int]]:
    """Loss masks of the rows; a row without one counts whole.

    Raises:
        DatasetError: nothing to learn from.
    """
    lines = {row.line for row in inputs.rows}
    masks = []
    with open(inputs.dataset, "rb") as stream:
        for line, raw in enumerate(stream, start=1):
            if line in lines:
                record = json.loads(raw)
                masks.append(record.get("loss_mask") or [1] * len(record["input_ids"]))
    if not any(any(mask) for mask in masks):
        raise DatasetError(f"{inputs.dataset}: no token has loss_mask 1, so there is nothing to learn")
    return masks


def finished(save_path: Path, best: checkpoints.Checkpoint | None, wanted_epochs: int) -> bool:
    """True when the last epoch is complete; with --save-best or a sparse --checkpoint-freq, when the trainer said so."""
    if best is not None and best.local_step == 0 and best.epoch >= wanted_epochs - 1:
        return True
    said = save_path / checkpoints.FINISHED
    if not said.exists() or best is None:
        return False
    return int(entry.read_json(str(said))["epochs"]) >= wanted_epochs


def _link_draft(folder: str, save_path: Path) -> str:
    """Point `draft` at the last whole checkpoint."""
    whole = [found for found in map(checkpoints.read, checkpoints.epochs(save_path)) if found is not None]
    last = max(whole, key=lambda checkpoint: checkpoint.position)
    link, temporary = os.path.join(folder, DRAFT), os.path.join(folder, f".{DRAFT}.tmp")
    entry.remove(temporary)
    os.symlink(os.path.join(CHECKPOINTS, last.path.name), temporary)
    os.replace(temporary, link)
    return link


def _same_settings(folder: str, args: argparse.Namespace, inputs: Inputs, processes: int) -> None:
    """Refuse to go on with another dataset, layers, map or number of processes: steps would not mean the same."""
    settings = {
        "model_sha256": inputs.manifest["model_sha256"], "prompts_sha256": inputs.manifest["prompts_sha256"],
        "layer_ids": inputs.manifest["layer_ids"], "vocab_map": inputs.map_facts.get("sha256"), "processes": processes,
    }  # fmt: skip
    path = os.path.join(folder, SETTINGS)
    if os.path.exists(path) and checkpoints.epochs(Path(folder, CHECKPOINTS)):
        old = entry.read_json(path)
        changed = [name for name, value in settings.items() if old.get(name) != value]
        if changed:
            raise ConfigError(
                f"{folder} holds a training with other settings: {', '.join(changed)} changed",
                hint="use another --output, or remove its checkpoints to start again",
            )
    write_atomically(path, json.dumps({**settings, "epochs": args.epochs}, indent=2).encode() + b"\n")


def visible_gpus() -> int:
    """GPUs this process may use; 0 without any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    import torch

    return int(torch.cuda.device_count())


def _inside(folder: str | None, name: str) -> str | None:
    return os.path.join(os.path.expanduser(folder), name) if folder else None


def _existing(path: str) -> str | None:
    return path if os.path.exists(path) else None


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any other flag goes to `speculators train` as it is.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, help="the target: checkpoint folder, or a repository id of the hub"
    )
    parser.add_argument("--revision")
    parser.add_argument(
        "--dataset", help="rows with input_ids and loss_mask (default: what the states were made from)"
    )
    parser.add_argument("--hidden-states", help="output folder of extract (default: that of the needed step)")
    parser.add_argument(
        "--vocab-map",
        help="output folder of vocab_map (default: the needed step's); none: the whole vocabulary",
    )
    parser.add_argument(
        "--output", default=entry.default_output("train"), help="folder of checkpoints, metrics and the draft"
    )
    parser.add_argument("--epochs", type=int, default=DEFAULT_EPOCHS)
    parser.add_argument(
        "--compiler-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="when torch.compile or Triton fails before the first step, go on with the eager loss, then uncompiled (default)",
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=0, help="processes (default: one per visible GPU)"
    )
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
