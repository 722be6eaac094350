"""The extract step: hidden states of chosen layers for every prompt, one safetensors file per sample.

    python extract.py --model FOLDER --dataset FILE.jsonl --layers 2,18,33,36 [--output FOLDER] [--backend ...]

Read `extract` from top to bottom: check everything that is cheap, keep the valid files of an earlier run, load, compute
what is missing, count. The parts are in `extraction/`; the ways to compute in `extraction/backends/`.
"""

from __future__ import annotations

import os
import sys

if __package__ in {
    None,
    "",
}:  # started as a script: its own folder must not shadow libraries, the release's root must be found
    _here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
    sys.path.insert(0, os.path.dirname(os.path.dirname(_here)))

import contextlib
from collections.abc import Sequence
from typing import Any

from remote_jobs.steps import entry
from remote_jobs.steps.extraction import backends, options
from remote_jobs.steps.extraction.backends import BackendConfig
from remote_jobs.steps.extraction.dataset import Row, read_dataset
from remote_jobs.steps.extraction.disk import DiskBudget, default_reserve
from remote_jobs.steps.extraction.errors import ConfigError, IncompleteError
from remote_jobs.steps.extraction.manifest import (
    check_resumable,
    differing,
    new_manifest,
    read_manifest,
    record_of_range,
    write_index,
    write_manifest,
)
from remote_jobs.steps.extraction.merge import MANIFEST_NAME, all_ended, forget_ranges, merge
from remote_jobs.steps.extraction.model import check_layer_ids, default_layer_ids, read_model
from remote_jobs.steps.extraction.options import Options
from remote_jobs.steps.extraction.parts import Part
from remote_jobs.steps.extraction.progress import Progress
from remote_jobs.steps.extraction.samples import (
    SampleWriter,
    Shape,
    clear_leftovers,
    one_at_a_time,
    output_folder,
    sample_files,
    scratch_folder,
    valid_samples,
)
from remote_jobs.steps.extraction.stop import StopSignal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; returns the exit status. The last line printed says why it failed."""

    def work(progress: Progress) -> None:
        opts = options.parse(argv)
        stop = StopSignal()
        with stop.installed():
            with output_folder(opts.output, opts.part) as folder:
                if opts.merge is None:
                    extract(opts, folder, progress, stop)
                else:
                    _merge(folder, opts.merge, progress, stop)
            if opts.join and opts.part is not None:
                _merge_if_last(opts.output, opts.part, progress, stop)

    return entry.run("extract", work)


def _merge(folder: str, count: int, progress: Progress, stop: StopSignal) -> None:
    with progress.phase("merge"), stop.raising():
        whole = merge(folder, count, progress.say)
    progress.say(f"Done: {count} ranges, {whole['samples']['valid']} samples are valid in {folder}.")


def _merge_if_last(output: str, part: Part, progress: Progress, stop: StopSignal) -> None:
    """Of ranges that no other step joins, whichever ends last does it; it has let go of the folder before.

    A range says that it is complete before it lets go. So of two that end at once, one at least finds nobody at work.
    Before all have ended the folder is not taken, for no moment: another range may be about to begin.
    """
    if not all_ended(os.path.abspath(os.path.expanduser(output)), part.count):
        progress.say("The range that ends last joins them.")
        return
    with contextlib.ExitStack() as locks:
        try:
            folder = locks.enter_context(output_folder(output))
        except ConfigError:
            progress.say("Another range is still at work in the folder: it joins them.")
            return
        if all_ended(folder, part.count):
            _merge(folder, part.count, progress, stop)


def extract(opts: Options, folder: str, progress: Progress, stop: StopSignal) -> None:
    """Bring the output folder to one valid file per dataset row (or per row of our range of them).

    See the errors of StepError for what it raises.
    """
    part = opts.part
    with progress.phase("load_config"), stop.raising():
        # Everything that can be known without loading the model is checked here, in about a second.
        model = read_model(opts.model, opts.revision)
        layers = default_layer_ids(model.num_hidden_layers) if opts.layers is None else opts.layers
        layer_ids = check_layer_ids(layers, model.num_hidden_layers)
        backend_name, reason = backends.resolve(opts.backend)
        module = backends.load(backend_name)
        if opts.overwrite and part is None:
            _clear(folder)
        all_rows = _read_rows(
            opts,
            read_manifest(folder),
            vocab_size=model.vocab_size,
            max_tokens=module.longest_prompt(model, opts.flags),
        )
        rows = all_rows[: opts.samples]
        config = BackendConfig(
            model=model,
            layer_ids=layer_ids,
            longest=max(len(row.token_ids) for row in rows),
            flags=opts.flags,
            argv=opts.argv,
            scratch=scratch_folder(folder, part),
            progress=progress,
            trust_remote_code=opts.trust_remote_code,
        )
        module.check(config)
        shape = Shape(len(layer_ids), model.hidden_size, module.state_dtype(config))
        manifest = new_manifest(
            model=model,
            layer_ids=layer_ids,
            dtype=shape.dtype,
            backend=backend_name,
            dataset=opts.dataset,
            rows=rows,
        )
        if part is not None and opts.join and _joined(folder, manifest, rows, all_rows, part, shape):
            progress.say(f"Done: the ranges in {folder} are joined already, and the samples of range {part} are valid.")
            return
        with one_at_a_time(folder) if part else contextlib.nullcontext():
            _take_folder(opts, folder, manifest, rows, all_rows)
        if part is not None:
            first, end = part.bounds([len(row.token_ids) for row in rows])
            clear_leftovers(folder, range(first, end))
            manifest = record_of_range(manifest, rows, part, first, end)
            write_manifest(folder, manifest, part)
            progress.say(f"Range {part.index} of {part.count}: rows {first} to {end - 1} of {len(rows)}")
            rows = rows[first:end]
        valid, damaged = valid_samples(folder, rows, shape)
        for path, why in damaged.items():
            progress.say(f"{os.path.basename(path)} is made again: {why}")
            os.unlink(path)
        pending = [row for row in rows if row.index not in valid]
        progress.say(
            f"{len(rows)} samples, {sum(len(row.token_ids) for row in rows)} tokens (longest {config.longest}), "
            f"layer ids {','.join(map(str, layer_ids))} of 0..{model.num_hidden_layers}, {shape.dtype}, "
            f"backend {backend_name} ({reason}). {len(valid)} valid files are there, {len(pending)} to do."
        )

    proof: dict[str, Any] | None = None
    if pending:
        with progress.phase("load_weights"), stop.raising():
            backend = module.open_backend(config)
        try:
            _note_facts(manifest, backend.facts(), folder, progress, part)
            with progress.phase("extract", done=len(valid), total=len(rows)):
                budget = DiskBudget(
                    folder, _reserve_bytes(opts, folder), opts.disk_wait_s, progress, stop.check
                )
                _compute(backend, pending, folder, shape, config, budget, stop, total=len(rows))
            if opts.verify and backend_name == "transformers":
                proof = _verify(opts, folder, rows, config, shape, backend, stop)
        finally:
            backend.close()
    # The count of valid files decides, whatever happened above.
    valid, damaged = valid_samples(folder, rows, shape)
    missing = [row.index for row in rows if row.index not in valid]
    manifest["samples"]["valid"] = len(valid)
    verifying = bool(opts.verify and rows)
    manifest["complete"] = not missing and not (part is not None and verifying)  # what is merged is verified
    write_manifest(folder, manifest, part)
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise IncompleteError(
            f"{len(missing)} of {len(rows)} samples are missing at the end of the run: rows {listed}"
        )
    if part is None:
        forget_ranges(folder)
    if verifying:
        manifest["complete"] = True
        manifest["verified"] = proof or _verify_afresh(opts, folder, rows, config, shape, progress, stop)
        write_manifest(folder, manifest, part)
    progress.say(
        f"Done: {len(valid)} of {len(rows)} samples are valid in {folder} ({len(pending)} made by this run)."
    )


def _read_rows(opts: Options, old: dict[str, Any] | None, **limits: int) -> list[Row]:
    """The rows asked for, and those of a former, longer run as well: its prompts must not have changed."""
    samples = opts.samples
    if samples is not None and old is not None:
        samples = max(samples, int(old.get("samples", {}).get("expected", 0)))
    return read_dataset(opts.dataset, samples=samples, **limits)


def _compute(
    backend: backends.Backend,
    pending: Sequence[Row],
    folder: str,
    shape: Shape,
    config: BackendConfig,
    budget: DiskBudget,
    stop: StopSignal,
    *,
    total: int,
) -> None:
    """Compute and store the pending rows. Files in hand are finished whatever ends the loop."""
    budget.warn(sum(shape.sample_bytes(len(row.token_ids)) for row in pending))
    writer = SampleWriter(folder, config.layer_ids)
    with config.progress.sample_bar(total, total - len(pending), "Extracting hidden states") as bar:
        try:
            results = backend.states([row.token_ids for row in pending])
            while True:
                with stop.raising():
                    result = next(results, None)
                if result is None:
                    break
                index, states = result
                row = pending[index]
                budget.wait_for(shape.sample_bytes(len(row.token_ids)))
                bar.update(len(writer.submit(row, states)))
            bar.update(len(writer.drain()))
        finally:
            writer.close()


def _verify(
    opts: Options,
    folder: str,
    rows: Sequence[Row],
    config: BackendConfig,
    shape: Shape,
    reference: Any,
    stop: StopSignal,
) -> dict[str, Any]:
    from remote_jobs.steps.extraction import verify

    with config.progress.phase("verify"), stop.raising():
        chosen = verify.pick(rows, opts.verify)
        proof = verify.verify(folder, chosen, config, shape.dtype, reference, opts.verify_tolerance)
    config.progress.say(
        f"Verified {proof['samples']} samples against a fresh forward pass: each layer fits itself best; largest relative "
        f"difference {proof['worst_relative_difference']:.2g} (limit {proof['tolerance']:.2g} there)."
    )
    return proof


def _verify_afresh(
    opts: Options,
    folder: str,
    rows: Sequence[Row],
    config: BackendConfig,
    shape: Shape,
    progress: Progress,
    stop: StopSignal,
) -> dict[str, Any]:
    """Verify with a newly loaded reference: nothing was computed by this run, or another backend did it."""
    import dataclasses

    module = backends.load("transformers")
    reference_config = dataclasses.replace(config, flags={"dtype": shape.dtype}, argv=())
    module.check(reference_config)
    with progress.phase("load_weights"), stop.raising():
        reference = module.open_backend(reference_config)
    try:
        return _verify(opts, folder, rows, reference_config, shape, reference, stop)
    finally:
        reference.close()


def _joined(
    folder: str,
    manifest: dict[str, Any],
    rows: Sequence[Row],
    all_rows: Sequence[Row],
    part: Part,
    shape: Shape,
) -> bool:
    """True when the folder holds this whole extraction: a range that comes again must not undo its manifest."""
    old = read_manifest(folder)
    if old is None or not old.get("complete") or old["samples"]["expected"] != len(rows):
        return False
    first, end = part.bounds([len(row.token_ids) for row in rows])
    mine = rows[first:end]
    return not differing(old, manifest, all_rows) and len(valid_samples(folder, mine, shape)[0]) == len(mine)


def _take_folder(
    opts: Options, folder: str, manifest: dict[str, Any], rows: Sequence[Row], all_rows: Sequence[Row]
) -> None:
    """Make the folder this extraction's, before the first sample: no later run can mix other states into it."""
    old = read_manifest(folder)
    if opts.overwrite and (sample_files(folder) if old is None else differing(old, manifest, all_rows)):
        _clear(folder)  # for ranges: what another extraction left, never what the other ranges make
        old = None
    check_resumable(folder, old, manifest, all_rows)
    if old is not None:
        manifest.update(
            {key: old[key] for key in ("created_at", "versions", "patch_set_sha256") if key in old}
        )
    write_manifest(folder, manifest)
    write_index(folder, rows)


def _note_facts(
    manifest: dict[str, Any], facts: dict[str, Any], folder: str, progress: Progress, part: Part | None
) -> None:
    """Put what computed the states into the manifest; say when a resumed folder gets a second maker."""
    former = manifest["versions"]
    manifest.update(facts)
    changed = sorted(
        name for name, version in manifest["versions"].items() if former.get(name, version) != version
    )
    if changed:
        progress.say("Note: the files from before were made with other versions of " + ", ".join(changed))
    write_manifest(folder, manifest, part)


def _reserve_bytes(opts: Options, folder: str) -> int:
    if opts.min_free_gib is None:
        return default_reserve(folder)
    return int(opts.min_free_gib * 1024**3)


def _clear(folder: str) -> None:
    """--overwrite: remove the samples and the manifest of another extraction, and nothing else."""
    for path in sample_files(folder):
        os.unlink(path)
    manifest = os.path.join(folder, MANIFEST_NAME)
    if os.path.exists(manifest):
        os.unlink(manifest)


if __name__ == "__main__":
    sys.exit(main())
