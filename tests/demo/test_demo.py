"""`orch demo` as a newcomer meets it: the whole story once, and every way to leave it early."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.errors import LocalError, UsageError
from orchestrator.services import demo as story
from orchestrator.services import demo_stage
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(320)
ORCH = [sys.executable, "-m", "orchestrator.cli.main"]
WITHIN_S = 300.0
"""Far above the two minutes that it takes alone: the suite shares its cores."""


class Demo:
    """A running `orch demo`, its lines, and everything in its temporary folder."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        self.tmp = tmp_path / "tm p"
        self.tmp.mkdir()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*ORCH, "demo", *flags],
            env={**os.environ, "TMPDIR": str(self.tmp)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str) -> None:
        def seen() -> bool:
            assert self.process.poll() is None or words in self.text, f"ended early:\n{self.text}"
            return words in self.text

        wait_until(
            seen, f"the demo says {words!r}", within_s=WITHIN_S, every_s=0.1, seen=lambda: self.text[-1500:]
        )

    def end(self) -> int:
        status = self.process.wait(WITHIN_S)
        self._reader.join()
        return status

    def leftovers(self) -> list[str]:
        """Processes that still have the demo's folder in their command, folder or environment."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                about = b"".join(
                    Path(f"/proc/{entry}/{name}").read_bytes() for name in ("cmdline", "environ")
                )
                about += os.readlink(f"/proc/{entry}/cwd").encode()
            except OSError:
                continue
            if str(self.tmp).encode() in about:
                found.append(f"{entry}: {about[:200]!r}")
        return found


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        if demo.process.poll() is None:
            os.killpg(demo.process.pid, signal.SIGTERM)
            demo.end()


def test_the_whole_story_and_a_kept_host(demos: list[Demo], tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--keep")
    demos.append(demo)
    assert demo.end() == 0, demo.text

    text = demo.text
    assert "kill -9" in text
    assert re.search(r"attempt 1 failed, exit status -9, class killed", text)
    assert "Traceback" not in text
    resumed = re.search(
        r"Attempt 1 had finished (\d+) of (\d+) samples when it was killed; attempt 2 made the other (\d+)",
        text,
    )
    assert resumed
    had, total, rest = map(int, resumed.groups())
    assert had + rest == total
    assert 0 < had < total
    assert f"{total} files for {total} prompts" in text
    took = re.search(r"Everything happened as it should, in (\d+) s", text)
    assert took
    print(f"the demo took {took[1]} s beside the rest of the suite")

    # What it prints to play with works, on the host that is still there.
    exports = dict(
        line.strip().removeprefix("export ").split("=", 1) for line in demo.lines if "export ORCH" in line
    )
    env = {**os.environ, **{name: shlex.split(value)[0] for name, value in exports.items()}}
    status_line = next(line.strip() for line in demo.lines if line.startswith("  orch status"))
    shown = subprocess.run(
        [*ORCH, *shlex.split(status_line)[1:]], env=env, capture_output=True, text=True, check=True
    )
    assert "succeeded" in shown.stdout
    end_line = next(
        line.strip() for line in demo.lines if line.strip().startswith("kill ") and "rm -r" in line
    )
    subprocess.run(["sh", "-c", end_line], check=True)
    wait_until(lambda: not demo.leftovers(), "nothing of the demo runs", within_s=30, seen=demo.leftovers)
    wait_until(lambda: not list(demo.tmp.iterdir()), "its folder is gone", within_s=10)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("An SSH server listens", signal.SIGINT),
        ("$ orch watch", signal.SIGTERM),
    ],
)
def test_an_interrupted_demo_leaves_nothing(
    words: str, number: int, demos: list[Demo], tmp_path: Path
) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.wait_for(words)
    began = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(demo.process.pid, number)  # a terminal's Ctrl-C reaches every command of the group
    else:
        demo.process.send_signal(number)

    assert demo.end() == 130
    assert "Interrupted: ending the demo's job and host." in demo.text
    assert "Traceback" not in demo.text
    assert time.monotonic() - began < 60
    assert demo.leftovers() == []
    assert list(demo.tmp.iterdir()) == []


def test_a_killed_demo_takes_its_host_along(demos: list[Demo], tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.wait_for("An SSH server listens")
    demo.process.kill()
    demo.end()
    wait_until(
        lambda: not [line for line in demo.leftovers() if "demo_host" in line],
        "the host ends when its starter dies",
        within_s=30,
        seen=demo.leftovers,
    )


def test_a_failing_demo_says_where_the_logs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "make_model.py").write_text("raise SystemExit('the disk said no')")
    monkeypatch.setattr(demo_stage, "PROGRAMS", programs)
    monkeypatch.setattr(demo_stage.tempfile, "tempdir", str(tmp_path))
    lines: list[str] = []

    assert story.demo(tell=lines.append) == 1

    assert "The demo failed: make_model.py ended with 1" in "\n".join(lines)
    assert "  the disk said no" in lines
    saved = Path(lines[-1].removeprefix("Logs of the host and of the job: "))
    assert (saved / "host.log").is_file()
    assert not list(tmp_path.glob("orch-demo-[!f]*")), "the demo's own folder is removed"


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_stage, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(UsageError, match="the demo needs no_such_package, not installed") as raised:
        story.demo()
    assert "orch-gpu[demo]" in str(raised.value.hint)


def test_too_little_room_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_stage, "NEEDED_BYTES", 10**18)
    with pytest.raises(LocalError, match=r"GB in .* are free"):
        story.demo()
