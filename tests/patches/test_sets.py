"""Patch sets against real wheels: hashes, diffs and every patched call, on each vLLM they are for."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from remote_jobs.patches import judge, probe, sets
from tests.patches.refresh_signatures import FILE, LEGACY, VERSIONS, describe
from tests.patches.wheels import installation, unpacked

pytestmark = pytest.mark.timeout(600)  # the first run downloads 0.5 GB
SUPPORTED = VERSIONS[1:]


@pytest.fixture(scope="module", params=sorted(LEGACY))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[sets.PatchSet, Path]:
    """A legacy set, and a site-packages with its speculators beside vLLM 0.16.0."""
    item = sets.by_name(sets.all_sets(), request.param)
    folder = tmp_path_factory.mktemp("site")
    return item, installation(folder, unpacked("vllm", "0.16.0"), unpacked("speculators", item.version))


def test_the_set_suits_the_real_wheels(pair: tuple[sets.PatchSet, Path]) -> None:
    """Originals by hash, diffs line by line, results by hash, probes and calls by signature."""
    item, site = pair
    found = judge.judge(item, str(site), item.version)
    assert (found.state, found.misfits) == (judge.SUITS, ())
    for file in item.files:
        text = judge.patched_text(str(site), file)
        compile(text, file.path, "exec")
        (site / "patched.py").write_text(text, newline="")
        assert sets.file_sha256(str(site / "patched.py")) == file.patched_sha256


def test_the_probe_sees_what_breaks(pair: tuple[sets.PatchSet, Path]) -> None:
    """The proof is not empty: speculators 0.3.0 as released does not fit vLLM 0.16, and the reasons are the known ones."""
    item, site = pair
    wrong = {}
    for call in item.calls:
        source = (site / call["file"]).read_text()
        wanted = probe.signature(str(site), call["signature"])
        for made in probe.calls(source, call["call"]):
            reason = probe.misfit(made, wanted)
            if reason:
                wrong[call["call"]] = reason
    if item.version == "0.3.0":
        assert "block_size" in wrong["Scheduler"]
        assert "kv_cache_specs" in wrong["get_kv_cache_config_from_groups"]
        assert "is_encoder_decoder" in wrong["SchedulerConfig"]
        assert not probe.calls((site / item.files[0].path).read_text(), "executor.sample_tokens")
    else:
        assert wrong == {}  # 0.4.0's faults are values, not signatures


def test_the_committed_signatures_are_those_of_the_wheel() -> None:
    """The fixture of 0.16.0 is what the real wheel says today."""
    assert describe("0.16.0") == json.loads(FILE.read_text())["0.16.0"]


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("name", sorted(LEGACY))
def test_every_call_fits_every_supported_version(name: str, version: str) -> None:
    """By the committed signatures, without any download of that vLLM."""
    recorded = json.loads(FILE.read_text())[version]
    item = sets.by_name(sets.all_sets(), name)
    site = unpacked("speculators", item.version)
    sources = {file.path: judge.patched_text(str(site), file) for file in item.files}
    for call in item.calls:
        parameters = [
            inspect.Parameter(
                parameter,
                getattr(inspect.Parameter, kind.upper()),
                default=None if optional else inspect.Parameter.empty,
            )
            for parameter, kind, optional in recorded["signatures"][call["signature"]]["parameters"]
        ]
        made = probe.calls(sources[call["file"]], call["call"])
        assert made, f"{call['call']} is not called at all"
        for each in made:
            assert probe.misfit(each, inspect.Signature(parameters)) is None, (call, version)
    assert recorded["verdicts"][name] == judge.SUITS


def test_the_version_the_generator_was_made_for_needs_no_set() -> None:
    """vLLM 0.11 with speculators 0.3.0 works as it is; the sets keep away from it."""
    assert set(json.loads(FILE.read_text())["0.11.0"]["verdicts"].values()) == {judge.UNSUITABLE}


def test_every_set_says_why() -> None:
    """Each change has its reason; each built-in set can be read."""
    found = sets.all_sets()
    assert len(found) >= 4
    for item in found:
        assert item.summary
        assert item.changes
        assert all(change["what"] and change["why"] for change in item.changes)
