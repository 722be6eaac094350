"""Makes XML variants of the one real `nvidia-smi -q -x` from changes that are data (xml_variants.json).

`python -m tests.gate.xml_variants NAME` prints one, to look at or to feed a stand-in nvidia-smi.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "nvidia_smi"
HEAD = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'


def variants() -> dict[str, dict[str, Any]]:
    """All variants by name."""
    return {v["name"]: v for v in json.loads((DATA / "xml_variants.json").read_text())}


def text_of(variant: dict[str, Any]) -> str:
    """The variant as nvidia-smi would print it."""
    root = ET.fromstring((DATA / "query_idle.xml").read_text())
    gpus = root.findall("gpu")
    for change in variant["changes"]:
        for gpu in gpus if change["gpu"] == "all" else [gpus[change["gpu"]]]:
            apply(root, gpu, change)
    for path, value in variant.get("root_set", {}).items():
        place(root, path).text = value
    text = HEAD + ET.tostring(root, encoding="unicode")
    # Text marked RAW is printed without escaping, as nvidia-smi does with some names.
    if "RAW:" in text:
        start = text.index("RAW:")
        end = text.index("</", start)
        raw = text[start + 4 : end].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
        text = text[:start] + raw + text[end:]
    if "cut_before" in variant:
        at = -1
        for _ in range(variant.get("cut_nth", 1)):
            at = text.index(variant["cut_before"], at + 1)
        text = text[:at]
    return str(variant.get("before", "")) + text + str(variant.get("after", ""))


def place(element: ET.Element, path: str) -> ET.Element:
    """The element at a path below another, made when missing."""
    for tag in path.split("/"):
        found = element.find(tag)
        element = ET.SubElement(element, tag) if found is None else found
    return element


def apply(root: ET.Element, gpu: ET.Element, change: dict[str, Any]) -> None:
    """Apply one change to one GPU."""
    if change.get("drop"):
        root.remove(gpu)
    if change.get("clear"):
        for child in list(gpu):
            gpu.remove(child)
    for path in change.get("remove", []):
        parent, _, tag = path.rpartition("/")
        holder = gpu.find(parent) if parent else gpu
        assert holder is not None
        holder.remove(holder.find(tag))  # type: ignore[arg-type]
    for path, value in change.get("set", {}).items():
        place(gpu, path).text = value
    if "process" in change:
        info = ET.SubElement(place(gpu, "processes"), "process_info")
        for key, value in {
            "gpu_instance_id": "N/A",
            "compute_instance_id": "N/A",
            **change["process"],
        }.items():
            ET.SubElement(info, key).text = str(value)
    for instance, used, total in change.get("mig", []):
        device = ET.SubElement(place(gpu, "mig_devices"), "mig_device")
        ET.SubElement(device, "gpu_instance_id").text = str(instance)
        place(device, "fb_memory_usage/total").text = total
        place(device, "fb_memory_usage/used").text = used


if __name__ == "__main__":
    print(text_of(variants()[sys.argv[1]]))
