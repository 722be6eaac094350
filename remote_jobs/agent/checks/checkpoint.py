"""Check 1: the checkpoint is all there. Headers only: 64 shards take well under two seconds on a local disk."""

from __future__ import annotations

import os
from typing import List, Optional

from remote_jobs.agent.checks import model, safetensors
from remote_jobs.agent.checks.context import FAIL, OK, SKIP, WARN, Row, Step, gib, row, worst

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "spiece.model",
                   "vocab.txt", "sentencepiece.bpe.model")  # fmt: skip
PARTIAL = (".incomplete", ".part", ".aria2", ".crdownload", ".tmp")
_NAMED = 4


def check(step: Step, shelf: model.Shelf) -> Optional[Row]:
    """The verdict on one step's model; None for a step without one."""
    located = model.locate(step)
    if located is None:
        return None
    given = str(step.params["model"])
    if located.folder is None:
        return _nowhere(step, located, given)
    config, problem, weights = shelf.get(located.folder)
    names = _names(located.folder)
    return judge(
        located.folder,
        config,
        problem,
        weights,
        names,
        needs_tokenizer=not (step.params.get("tokenizer") or step.params.get("skip_tokenizer_init")),
        trust=bool(step.params.get("trust_remote_code")) or step.uses == "extract",
        dummy=step.params.get("load_format") == "dummy",
    )


def _nowhere(step: Step, located: model.Located, given: str) -> Row:
    maker = step.maker_of(step.path(given))
    if maker:
        return row(SKIP, "{} is made by step {}".format(given, maker))
    if located.hub_name is None:
        return row(
            FAIL,
            located.problem,
            "correct `model` of step {}; relative paths are under workdir".format(step.name),
        )
    if step.env("HF_HUB_OFFLINE") in ("1", "true", "TRUE", "yes"):
        return row(
            FAIL,
            "{} is not in the Hugging Face cache and HF_HUB_OFFLINE is set".format(given),
            "fetch it first: `hf download {}`, or give the folder's path".format(given),
        )
    return row(
        WARN,
        "{} is neither a folder nor in the Hugging Face cache: it is downloaded at the start".format(given),
        "fetch it first: `hf download {}`".format(given),
    )


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def judge(
    folder: str,
    config: Optional[model.ModelConfig],
    problem: str,
    weights: model.Weights,
    names: List[str],
    *,
    needs_tokenizer: bool = True,
    trust: bool = False,
    dummy: bool = False,
) -> Row:
    """Decide from what was read.

    Args:
        folder: the checkpoint.
        config: its config, None with `problem` when unreadable.
        problem: what is wrong with config.json.
        weights: its files and headers.
        names: what lies in the folder.
        needs_tokenizer: the step tokenizes.
        trust: code of the checkpoint may be run.
        dummy: `load_format: dummy` needs no weights.
    """
    found: List[Row] = []
    if config is None:
        found.append(row(FAIL, problem, "fetch config.json again, or correct `model`"))
    if not dummy:
        found += _weights(folder, config, weights, names)
    if needs_tokenizer:
        found += _tokenizer(folder, names)
    if config is not None:
        missing_code = [name for name in config.custom_code if name not in names]
        if missing_code and trust:
            found.append(row(FAIL, "config.json names {}, which is not there".format(", ".join(missing_code)),
                             "fetch the *.py files of the checkpoint as well"))  # fmt: skip
        if config.custom_code and not trust and "tokenizer.json" not in names:
            found.append(row(FAIL, "the checkpoint brings its own code ({})".format(", ".join(config.custom_code)),
                             "set `trust_remote_code: true` after reading that code"))  # fmt: skip
        if config.layers is None or config.hidden is None:
            found.append(row(WARN, "config.json names no num_hidden_layers or hidden_size", ""))
    size = gib(weights.total_bytes)
    text = "{}: {} files, {}, all whole".format(folder, len(weights.files), size)
    return worst(found, text) if found else row(OK, text)


def _weights(
    folder: str, config: Optional[model.ModelConfig], weights: model.Weights, names: List[str]
) -> List[Row]:
    if weights.problem:
        return [row(FAIL, weights.problem, "fetch the index again")]
    if not weights.files:
        partial = [name for name in names if name.endswith(PARTIAL)]
        if partial:
            return [
                row(
                    FAIL,
                    "{} holds unfinished downloads: {}".format(folder, _few(partial)),
                    "finish the download",
                )
            ]
        return [
            row(
                FAIL,
                "{} holds no weights (*.safetensors, *.bin)".format(folder),
                "fetch them, or correct `model`",
            )
        ]
    found = []
    bad = [shard for shard in weights.shards if shard.fault]
    if bad:
        fix = "; ".join(dict.fromkeys(shard.fix for shard in bad[:_NAMED]))
        text = "{} of {} weight files of {} cannot be loaded: {}"
        found.append(
            row(
                FAIL,
                text.format(len(bad), len(weights.files), folder, _few([str(b.fault) for b in bad])),
                fix,
            )
        )
    found += _index(folder, weights)
    absent = model.missing_layers(weights, config) if config is not None and not bad else []
    if absent:
        text = "config.json says {} layers, no weights for layer {}".format(
            config.layers if config else "?", _few([str(a) for a in absent])
        )
        found.append(row(FAIL, text, "the index or the config is of another checkpoint: fetch both again"))
    partial = [name for name in names if name.endswith(PARTIAL)]
    if partial:
        found.append(
            row(WARN, "unfinished downloads beside it: {}".format(_few(partial)), "finish or remove them")
        )
    return found


def _index(folder: str, weights: model.Weights) -> List[Row]:
    """Tensors that the index promises and the shards do not hold."""
    if weights.weight_map is None or weights.format != "safetensors":
        return []
    whole = {os.path.basename(s.path): set(s.tensors) for s in weights.shards if not s.fault}
    lost = [
        "{} in {}".format(tensor, file)
        for tensor, file in weights.weight_map.items()
        if file in whole and tensor not in whole[file]
    ]
    if not lost:
        return []
    text = "{} tensors of the index are not in their shards: {}".format(len(lost), _few(lost))
    return [row(FAIL, text, "index and shards in {} are of two versions: fetch them again".format(folder))]


def _tokenizer(folder: str, names: List[str]) -> List[Row]:
    there = [name for name in TOKENIZER_FILES if name in names]
    if not there:
        return [row(FAIL, "{} holds no tokenizer ({}, ...)".format(folder, ", ".join(TOKENIZER_FILES[:3])),
                    "fetch the tokenizer files, or set `tokenizer`")]  # fmt: skip
    for name in there:
        path = os.path.join(folder, name)
        if safetensors.is_lfs_pointer(path):
            return [
                row(FAIL, "{} is a Git LFS pointer".format(path), "run `git lfs pull` in {}".format(folder))
            ]
        if not os.path.exists(path) or os.path.getsize(path) == 0:
            return [row(FAIL, "{} is empty or a dead link".format(path), "fetch {} again".format(name))]
        if name.endswith(".json"):
            try:
                model.read_json(folder, name)
            except (model.BadFile, OSError) as exc:
                return [row(FAIL, str(exc), "fetch {} again".format(name))]
    return []


def _few(items: List[str]) -> str:
    more = len(items) - _NAMED
    return "; ".join(items[:_NAMED]) + ("; and {} more".format(more) if more > 0 else "")
