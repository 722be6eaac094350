"""Hosts in the live view: one line for each link, one row for each GPU. Pure.

With many hosts the links that are fine become one line and those in trouble keep theirs; the GPUs shown are those of the
chosen job's host.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from orchestrator.services.views import HostView, WatchView
from orchestrator.ui.job import Json, Moment
from orchestrator.ui.screen import Screen, gauge
from orchestrator.ui.status import skew_words
from orchestrator.ui.text import duration, one_line, plural

LINK_STYLE = {
    "connected": "green",
    "connecting": "bright_black",
    "waking": "yellow",
    "reconnecting": "yellow",
    "refused": "bold red",
}
LINK_WORDS = {"waking": "this laptop slept; looking again"}
ALL_LINES = 3
"""Up to this many hosts each have a line of their own."""
TROUBLE_LINES = 3
STALE_S = 60.0


def link_lines(view: WatchView, moment: Moment) -> list[Text]:
    """The links: every one, or the sum of the good ones and a line for each in trouble."""
    hosts = list(view.hosts.values())
    if len(hosts) <= ALL_LINES:
        return [_link(host, moment) for host in hosts]
    trouble = [host for host in hosts if host.link in {"reconnecting", "refused"} or skew_words(host.skew_s)]
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host.link] = counts.get(host.link, 0) + 1
    line = Text(f"{len(hosts)} hosts")
    for link, count in counts.items():
        line.append("  ").append(f"{count} {link}", LINK_STYLE.get(link, ""))
    ages = [_age_s(host, moment) for host in hosts if host.looked_at is not None]
    if ages:
        line.append(f"  looked {duration(min(ages))} to {duration(max(ages))} ago")
    due = [host.next_look_at for host in hosts if host.next_look_at is not None]
    if due:
        line.append(f", next {_in_words((min(due) - moment.now).total_seconds())}")
    lines = [line, *(_link(host, moment) for host in trouble[:TROUBLE_LINES])]
    if len(trouble) > TROUBLE_LINES:
        lines.append(Text(f"... and {len(trouble) - TROUBLE_LINES} more in trouble", "yellow"))
    return lines


def _age_s(host: HostView, moment: Moment) -> float:
    return max(0.0, (moment.now - host.looked_at).total_seconds()) if host.looked_at else 0.0


def _in_words(seconds: float) -> str:
    whole = round(seconds)
    return "now" if whole < 1 else f"in {whole}s" if whole < 60 else f"in {duration(whole)}"


def _link(host: HostView, moment: Moment) -> Text:
    line = Text.assemble((one_line(host.name), "bold"), "  ", (host.link, LINK_STYLE.get(host.link, "")))
    if host.link in LINK_WORDS:
        line.append(f"  {LINK_WORDS[host.link]}")
    if host.looked_at is not None:
        age_s = _age_s(host, moment)
        line.append(f"  looked {duration(age_s)} ago", "yellow" if age_s > STALE_S else "")
    if host.link in {"connected", "reconnecting"} and host.next_look_at is not None:
        line.append(f", next {_in_words((host.next_look_at - moment.now).total_seconds())}")
    if host.round_trip_s is not None and host.link == "connected":
        line.append(f", {host.round_trip_s * 1000:.0f} ms away")
    if host.problem:
        line.append(f"  {one_line(host.problem)}", "yellow")
    skew = skew_words(host.skew_s)
    if skew:
        line.append(f"  {skew}", "yellow")
    return line


def gpu_lines(view: WatchView, screen: Screen, host: str | None, room: int) -> list[Text]:
    """One row per GPU, or one line for all of a host's where ``room`` lines are too few; ``host``: only that one's."""
    hosts = [item for item in view.hosts.values() if host in {None, item.name} and (item.gpus or {}).get("gpus")]
    full = [line for item in hosts for line in _rows(item, screen)]
    if len(full) <= room:
        return full
    short = [_sum(item) for item in hosts]
    return short if len(short) <= room else []


def _rows(host: HostView, screen: Screen) -> list[Text]:
    gpus = list((host.gpus or {}).get("gpus") or [])
    width = max((len(_memory(gpu)) for gpu in gpus), default=0)
    return [_head(host), *(_row(gpu, screen, width) for gpu in gpus)]


def _head(host: HostView) -> Text:
    age_s = (host.gpus or {}).get("age_s")
    return Text.assemble(
        (f"GPUs of {one_line(host.name)}", "bold"), (f"  read {duration(age_s)} ago" if age_s else "", "bright_black")
    )


def _memory(gpu: Json) -> str:
    used, total = gpu.get("memory_used_mib"), gpu.get("memory_total_mib")
    return f"{float(used) / 1024:.1f}/{float(total) / 1024:.0f} GiB" if used is not None and total else "-"


def _row(gpu: Json, screen: Screen, width: int) -> Text:
    used, total = gpu.get("memory_used_mib"), gpu.get("memory_total_mib")
    line = Text(f"  {gpu.get('index', '?')!s:>2}  ")
    if used is not None and total:
        cells = max(6, min(20, screen.width // 8))
        line.append_text(gauge(float(used) / float(total), cells, "magenta", screen)).append("  ")
    line.append(f"{_memory(gpu):>{width}}")
    utilization, power = gpu.get("utilization_pct"), gpu.get("power_w")
    line.append(f"  {utilization:3.0f}%" if utilization is not None else "     -")
    line.append(f"  {power:4.0f} W" if power is not None else "")
    owners = _owners([gpu])
    if owners:
        line.append(f"  {one_line(', '.join(owners))}")
    elif gpu.get("clean"):
        line.append("  free", "green")
    if gpu.get("health") not in {None, "ok"}:
        line.append(f"  {one_line(str(gpu['health']))}", "bold red")
    return line


def _owners(gpus: Sequence[Json]) -> list[str]:
    return list(dict.fromkeys(str(item.get("owner")) for gpu in gpus for item in gpu.get("processes") or []))


def _sum(host: HostView) -> Text:
    """All GPUs of a host in one line."""
    gpus = list((host.gpus or {}).get("gpus") or [])
    line = Text.assemble((f"{plural(len(gpus), 'GPU')} of {one_line(host.name)}", "bold"))
    used = [float(gpu["memory_used_mib"]) for gpu in gpus if gpu.get("memory_used_mib") is not None]
    total = [float(gpu["memory_total_mib"]) for gpu in gpus if gpu.get("memory_total_mib")]
    if used and total:
        line.append(f"  {sum(used) / 1024:.0f}/{sum(total) / 1024:.0f} GiB")
    busy = [float(gpu["utilization_pct"]) for gpu in gpus if gpu.get("utilization_pct") is not None]
    if busy:
        low, high = min(busy), max(busy)
        line.append(f"  {low:.0f}%" if low == high else f"  {low:.0f}-{high:.0f}%")
    power = [float(gpu["power_w"]) for gpu in gpus if gpu.get("power_w") is not None]
    if power:
        line.append(f"  {sum(power):.0f} W")
    owners = _owners(gpus)
    line.append(f"  {one_line(', '.join(owners))}" if owners else "")
    sick = [gpu for gpu in gpus if gpu.get("health") not in {None, "ok"}]
    for gpu in sick[:2]:
        line.append(f"  GPU {gpu.get('index')}: {one_line(str(gpu['health']))}", "bold red")
    return line
