"""`orch gpus` for people: who holds what, since when, with which command. Pure functions of the JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from orchestrator.ui.text import duration, one_line

Json = Mapping[str, Any]
_HEAD = ("GPU", "NAME", "MEMORY", "UTIL", "STATE")


def gpu_lines(document: Json) -> list[Text]:
    """All lines: a table of the GPUs, under each its processes, and at the end what it means.

    Args:
        document: as `orch gpus --json`; `holders` and `notes`, where a host answered, add age and command line.
    """
    gpus = list(document.get("gpus") or [])
    holders = {row["pid"]: row for row in document.get("holders") or []}
    rows = [_cells(gpu) for gpu in gpus]
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD) - 1)]
    lines = [Text(_columns(_HEAD, widths), style="bold")] if gpus else []
    for gpu, row in zip(gpus, rows, strict=True):
        style = "green" if gpu["clean"] else "red"
        lines.append(Text.assemble(_columns(row[:-1], widths), "  ", (row[-1], style)))
        lines += [_process_line(process, holders.get(process["pid"])) for process in gpu["processes"]]
    lines += [Text(f"note: {one_line(note)}", style="dim") for note in document.get("notes") or []]
    lines.append(_verdict(document))
    return lines


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells padded to their columns; the last one keeps its length."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, *cells[len(widths) :]])


def _cells(gpu: Json) -> tuple[str, ...]:
    index = "?" if gpu["index"] is None else str(gpu["index"])
    used, total = _number(gpu["memory_used_mib"]), _number(gpu["memory_total_mib"])
    util = "-" if gpu["utilization_pct"] is None else f"{gpu['utilization_pct']} %"
    state = "clean" if gpu["clean"] else one_line(str(gpu["why"]))
    return index, one_line(str(gpu["name"] or "-")), f"{used} / {total} MiB", util, state


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _process_line(process: Json, holder: Json | None) -> Text:
    memory = "" if process["memory_mib"] is None else f"  {process['memory_mib']} MiB"
    line = Text(f"     pid {_number(process['pid'])}{memory}  {process['kind']}  ")
    line.append(one_line(str(process["owner"])), style="dim" if process["kind"] == "graphics" else "bold")
    if holder is not None and holder.get("since_s") is not None:
        line.append(f"  for {duration(holder['since_s'])}")
    command = holder.get("command") if holder is not None else None
    line.append(f"  {one_line(str(command or process['name']))}")
    if holder is not None and holder.get("why"):
        line.append(f"  ({one_line(str(holder['why']))})", style="yellow")
    return line


def _verdict(document: Json) -> Text:
    expected = document.get("expected")
    there = len(document.get("gpus") or [])
    count = f"{there} of {expected}" if expected is not None else str(there)
    if document["clean"] and expected == 0 and not there:
        return Text("clean: no GPU is asked for", style="green")
    if document["clean"] and all(gpu["memory_used_mib"] is None for gpu in document.get("gpus") or []):
        said = f"{count} GPU{'s' if there != 1 else ''} free" if there else "no compute process"
        return Text(f"clean as far as this output tells: {said}; memory was not measured, see nvidia-smi -q -x", style="yellow")
    if document["clean"]:
        return Text(f"clean: {count} GPU{'s' if there != 1 else ''} free", style="green")
    if there:
        dirty = sum(not gpu["clean"] for gpu in document["gpus"])
        if dirty:
            return Text(f"not clean: {dirty} of {there} GPUs cannot be used now", style="red")
    return Text(f"not clean: {one_line(str(document.get('why') or ''))}", style="red")
