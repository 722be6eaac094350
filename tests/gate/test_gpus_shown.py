"""`orch gpus`: from a file of any kind to the document, and from the document to lines a person can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.errors import UsageError
from orchestrator.services.gpus_file import gpus_from_file
from orchestrator.ui.gpus import gpu_lines
from remote_jobs.agent import gate, gpus, owners
from tests.gate.test_read_smi import DATA
from tests.gate.xml_variants import text_of, variants


def shown(document: dict[str, object]) -> list[str]:
    return [line.plain for line in gpu_lines(document)]


def test_a_pasted_table_is_shown_with_holders() -> None:
    lines = shown(gpus_from_file(str(DATA / "table_082_same_pids_on_both.txt")))
    assert lines[0].split() == ["GPU", "NAME", "MEMORY", "UTIL", "STATE"]
    assert any(
        "pid 11090  413 MiB  compute  unknown  ...r-studio/.bundled/worker/node" in line for line in lines
    )
    assert lines[-1] == "not clean: 2 of 2 GPUs cannot be used now"


def test_a_host_shows_since_when_and_the_command() -> None:
    known = {2541: owners.Owner(2541, "job:old", job="old", since_s=7500.0, command="python serve.py", standing="orphan",
                                why="its main process is gone")}  # fmt: skip
    reading = gate.judge(gpus.parse(text_of(variants()["own_orphan_like_process"])), expected=2, known=known)
    document = {
        **reading.document,
        "holders": [owners.as_row(o) for o in reading.orphans],
        "notes": ["in a container"],
    }
    lines = shown(document)
    assert (
        "     pid 2541  114742 MiB  compute  job:old  for 2h05m  python serve.py  (its main process is gone)"
        in lines
    )
    assert "note: in a container" in lines


def test_clean_and_error_have_one_last_line() -> None:
    assert shown(gpus.parse((DATA / "table_idle.txt").read_text()).to_json(8))[-1].startswith(
        "not clean: 2 of 8 GPUs"
    )
    assert (
        shown(gpus.parse((DATA / "table_idle.txt").read_text()).to_json(2))[-1] == "clean: 2 of 2 GPUs free"
    )
    assert (
        "not clean: bash: nvidia-smi: command not found"
        in shown(gpus.parse("bash: nvidia-smi: command not found").to_json())[-1]
    )


def test_text_of_a_process_cannot_style_the_terminal() -> None:
    text = "|    0   N/A  N/A    1      C   evil\x1b]0;title\x07name                 10MiB |"
    assert not any("\x1b" in line for line in shown(gpus.parse(text).to_json()))


def test_powershell_writes_utf_16(tmp_path: Path) -> None:
    path = tmp_path / "smi.txt"
    path.write_text((DATA / "table_idle.txt").read_text(), encoding="utf-16")
    assert gpus_from_file(str(path))["clean"] is True


def test_a_list_of_processes_alone_is_clean_with_a_reservation() -> None:
    """Memory without a process is what an orphan in a container looks like: such a list cannot show it."""
    for name, said in (("apps_idle.csv", "no compute process"), ("pmon_idle.txt", "2 GPUs free")):
        last = shown(gpus_from_file(str(DATA / name)))[-1]
        assert last == f"clean as far as this output tells: {said}; memory was not measured, see nvidia-smi -q -x"
    assert shown(gpus_from_file(str(DATA / "query_gpu.csv")))[-1] == "clean: 2 GPUs free"


def test_a_host_of_which_no_gpu_is_asked_for_is_clean_without_a_word_of_measuring() -> None:
    assert shown({"gpus": [], "clean": True, "expected": 0, "why": "no GPU is asked for"}) == ["clean: no GPU is asked for"]


def test_a_missing_file_says_how_to_make_one() -> None:
    with pytest.raises(UsageError, match="cannot read /no/such/file") as caught:
        gpus_from_file("/no/such/file")
    assert "nvidia-smi -q -x >" in (caught.value.hint or "")
