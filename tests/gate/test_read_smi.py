"""Whatever people paste from nvidia-smi is read, and a GPU is called clean exactly when nobody's work holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remote_jobs.agent import gpus

DATA = Path(__file__).parents[1] / "data" / "nvidia_smi"
REAL: dict[str, dict[str, Any]] = {
    "table_idle.txt": {
        "gpus": [[0, 0, 143771], [1, 0, 143771]],
        "compute": [],
        "clean": True,
        "per_gpu": [True, True],
    },
    "query_gpu.csv": {
        "gpus": [[0, 0, 143771], [1, 0, 143771]],
        "compute": [],
        "clean": True,
        "per_gpu": [True, True],
    },
    "query_idle.xml": {
        "gpus": [[0, 0, 143771], [1, 0, 143771]],
        "compute": [],
        "clean": True,
        "per_gpu": [True, True],
    },
    "table_and_apps_orphans.txt": {
        "gpus": [[0, 114751, 143771], [1, 114751, 143771]],
        "compute": [[0, 2541, 114742], [1, 2586, 114742]],
        "clean": False,
        "per_gpu": [False, False],
    },
    "table_082_same_pids_on_both.txt": {
        "gpus": [[0, 1691, 24564], [1, 1691, 24564]],
        "compute": [[gpu, pid, 413] for gpu in (0, 1) for pid in (11090, 11121, 11134, 11146)],
        "clean": False,
        "per_gpu": [False, False],
    },
    "table_087_container.txt": {
        "gpus": [[0, 10106, 97887], [1, 4, 97887]],
        "compute": [],
        "clean": False,
        "per_gpu": [False, True],
    },
    "list.txt": {
        "gpus": [[0, None, None], [1, None, None]],
        "compute": [],
        "clean": False,
        "per_gpu": [False, False],
    },
    "apps_idle.csv": {"gpus": [], "compute": [], "clean": True, "per_gpu": []},
    "pmon_idle.txt": {
        "gpus": [[0, None, None], [1, None, None]],
        "compute": [],
        "clean": True,
        "per_gpu": [True, True],
    },
    "topo.txt": {"gpus": [], "compute": [], "clean": False, "per_gpu": []},
}


def sections() -> dict[str, tuple[dict[str, Any], str]]:
    """The pasted texts: name -> (expected, text)."""
    found = {}
    for part in (DATA / "texts.txt").read_text().split("### ")[1:]:
        name, expected, text = part.split("\n", 2)
        found[name] = (json.loads(expected), text)
    return found


TEXTS = sections()


def summary(document: dict[str, Any]) -> dict[str, Any]:
    return {
        "gpus": [[g["index"], g["memory_used_mib"], g["memory_total_mib"]] for g in document["gpus"]],
        "compute": [
            [g["index"], p["pid"], p["memory_mib"]]
            for g in document["gpus"]
            for p in g["processes"]
            if p["kind"] == "compute"
        ],
        "clean": document["clean"],
        "per_gpu": [g["clean"] for g in document["gpus"]],
    }


@pytest.mark.parametrize("name", REAL)
def test_real_output(name: str) -> None:
    document = gpus.parse((DATA / name).read_text()).to_json()
    assert summary(document) == REAL[name]


@pytest.mark.parametrize("name", TEXTS)
def test_pasted_text(name: str) -> None:
    expected, text = TEXTS[name]
    document = gpus.parse(text).to_json()
    assert summary(document) == expected
    assert document["why"]
    assert all(gpu["why"] for gpu in document["gpus"])


@pytest.mark.parametrize("name", TEXTS)
def test_windows_line_ends_and_colours_change_nothing(name: str) -> None:
    expected, text = TEXTS[name]
    coloured = (
        "".join("\x1b[32m" + line + "\x1b[0m\r\n" for line in text.split("\n")) if "|" in text else text
    )
    assert summary(gpus.parse(coloured).to_json()) == expected


@pytest.mark.parametrize("name", [n for n in TEXTS if n.startswith("error_")])
def test_an_error_says_what_was_seen_and_what_to_do(name: str) -> None:
    why = str(gpus.parse(TEXTS[name][1]).to_json()["why"])
    assert len(why) > 30
    first = next((line for line in TEXTS[name][1].splitlines() if line.strip()), "empty output")
    assert first.strip()[:20] in why


def test_the_documents_keys_are_the_contract() -> None:
    document = gpus.parse((DATA / "table_and_apps_orphans.txt").read_text()).to_json(expected=8)
    assert set(document) == {"schema", "gpus", "clean", "expected", "why"}
    assert document["schema"] == 1
    assert document["expected"] == 8
    gpu = document["gpus"][0]  # type: ignore[index]
    assert set(gpu) == {
        "index",
        "uuid",
        "name",
        "memory_used_mib",
        "memory_total_mib",
        "utilization_pct",
        "processes",
        "health",
        "clean",
        "why",
    }
    assert set(gpu["processes"][0]) == {"pid", "name", "memory_mib", "kind", "owner"}


def test_fewer_gpus_than_expected_is_not_clean_and_names_the_missing_ones() -> None:
    document = gpus.parse((DATA / "table_idle.txt").read_text()).to_json(expected=4)
    assert document["clean"] is False
    assert "2 of 4 GPUs answer: index 2, 3 missing" in str(document["why"])


def test_every_cut_of_a_real_table_is_read_without_an_exception_and_never_called_clean_while_held() -> None:
    text = (DATA / "table_and_apps_orphans.txt").read_text()
    for end in range(0, len(text), 37):
        document = gpus.parse(text[:end]).to_json()
        held = [g for g in document["gpus"] if g["memory_used_mib"] and g["memory_used_mib"] > 1000]  # type: ignore[attr-defined]
        assert not any(g["clean"] for g in held)


def test_every_cut_of_real_xml_is_read() -> None:
    text = (DATA / "query_idle.xml").read_text()
    whole = gpus.parse(text).to_json()["gpus"]
    for end in range(0, len(text), 501):
        found = gpus.parse(text[:end]).to_json()["gpus"]
        assert found[:1] in ([], whole[:1]) or found[0]["clean"] is False  # type: ignore[index]
