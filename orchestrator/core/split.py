"""`split: N`: one step of a plan becomes N ranges that run side by side, and a last step that joins them. Pure.

The host knows nothing of splits. A range is an ordinary step with its own GPUs, attempts and log, so it is retried,
stopped and explained alone; the joining step keeps the plan's name, so that whatever needs the step waits for all of
it. See docs/decisions/0011-split.md. Must not import plan: it works on the spec's own records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPLITTABLE = "extract"
"""The built-in step that can do a range of its work; a `run` step reads the two variables itself."""
INDEX_ENV, COUNT_ENV = "ORCH_SPLIT_INDEX", "ORCH_SPLIT_COUNT"
MAX_NAME = 64


def range_name(step: str, index: int, count: int) -> str:
    """Name of one range's step; ``index`` counts from 1."""
    return f"{step}-{index}of{count}"


def arrays(jobs: Sequence[tuple[str, str]], queued: Mapping[str, bool]) -> dict[str, list[str]]:
    """Job -> all jobs of the array that it is a task of, in order; jobs that are submitted alone are left out.

    Args:
        jobs: (id, host) in the order of their ranges.
        queued: as for :func:`shares`.
    """
    found: dict[str, list[str]] = {}
    for job, host in jobs:
        together = [other for other, there in jobs if there == host]
        if queued[host] and len(together) > 1:
            found[job] = together
    return found


def shares(ranges: int, hosts: Mapping[str, bool]) -> list[tuple[str, list[int]]]:
    """(host, ranges) of every job of a split over hosts: blocks that differ by one at most.

    Args:
        ranges: how many there are.
        hosts: name -> True when a scheduler hands out its machines: each range is a job of its own there, so that it
            starts when there is room for it.
    """
    found: list[tuple[str, list[int]]] = []
    for at, (host, queued) in enumerate(hosts.items()):
        block = list(range(at * ranges // len(hosts) + 1, (at + 1) * ranges // len(hosts) + 1))
        found += [(host, [index]) for index in block] if queued else [(host, block)]
    return found


def expand(
    steps: Sequence[Mapping[str, Any]], only: Sequence[int] | None = None, *, join: bool = False
) -> list[dict[str, Any]]:
    """The steps of a spec with every split step replaced by its ranges and the step that joins them.

    Args:
        steps: records of `StepSpec`, in plan order.
        only: the ranges that this job does (a split over several jobs); they are joined elsewhere.
        join: or by the last of them to end, for they all write into one folder.
    """
    expanded: list[dict[str, Any]] = []
    for step in steps:
        count = int(step.get("split") or 1)
        if count < 2:
            expanded.append(dict(step))
            continue
        chosen = list(only) if only is not None else list(range(1, count + 1))
        expanded += [_range(step, index, count, join=join) for index in chosen]
        if only is None:
            expanded.append(_join(step, count))
    return expanded


def one_after_another(spec: Mapping[str, Any]) -> list[str]:
    """What a person should know of a split that gains nothing, for lack of GPUs; of expanded steps."""
    found = {}
    ranges = [step["part"]["of"] for step in spec["steps"] if step.get("part")]
    for step in spec["steps"]:
        part, gpus, there = step.get("part"), int(step.get("gpus") or 0), spec.get("host_gpus")
        if part and ranges.count(part["of"]) > 1 and gpus and there and gpus * 2 > there:
            found[part["of"]] = (
                f"the ranges of {part['of']} run one after another: each takes {gpus} of {there} GPUs "
                "(gpus: is what one range takes)"
            )
    return list(found.values())


def for_ranges(by_step: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is told by the plan's names (secrets), also under the names of the ranges.

    Args:
        by_step: step of the plan -> anything.
        steps: the expanded steps.
    """
    found = dict(by_step)
    for step in steps:
        part = step.get("part")
        if part and part["of"] in by_step:
            found[step["name"]] = by_step[part["of"]]
    return found


def with_whole_steps(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A job's steps, and the plan's step where only ranges of it are in this job."""
    found = {str(step["name"]): step for step in steps}
    for step in steps:
        if step.get("part"):
            of = str(step["part"]["of"])
            found.setdefault(of, {"name": of, "uses": step.get("uses")})
    return list(found.values())


def for_each_range(changes: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Changes of a split step (``extract.with.x``) as changes of its ranges; what says how the joining is to be done
    (``with``, ``retry``) reaches that step too, its GPUs and time limits stay as they are.
    """
    found: dict[str, Any] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        ranges = [str(step["name"]) for step in steps if (step.get("part") or {}).get("of") == name]
        found.update({f"{one}.{rest}": value for one in ranges})
        if not ranges or rest.partition(".")[0] in {"with", "retry", "done"}:
            found[path] = value
    return found


def _range(step: Mapping[str, Any], index: int, count: int, *, join: bool) -> dict[str, Any]:
    name = str(step["name"])
    params = dict(step.get("params") or {})
    if join and step.get("uses"):
        params["join"] = True
    return {
        **step,
        "params": params,
        "name": range_name(name, index, count),
        "env": {**(step.get("env") or {}), INDEX_ENV: str(index), COUNT_ENV: str(count)},
        "output": _output(step),
        "done": None,
        "split": 1,
        "part": {"of": name, "index": index, "count": count},
    }


def _join(step: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The last step: it computes nothing, so it needs no GPUs, no secrets and no patches."""
    name = str(step["name"])
    joined = {
        **step,
        "needs": [range_name(name, index, count) for index in range(1, count + 1)],
        "gpus": 0,
        "secrets": [],
        "patches": None,
        "output": _output(step),
        "timeout_s": None,
        "hang_s": None,
    }
    if step.get("uses"):
        joined["params"] = {**(step.get("params") or {}), "merge": count}
    else:
        joined["run"] = ":"  # its `done:` is checked as for any step
    return joined


def _output(step: Mapping[str, Any]) -> str:
    """The plan's step's output, which all its ranges share; a range's own name would make another folder."""
    return str(step.get("output") or (step.get("params") or {}).get("output") or step["name"])
