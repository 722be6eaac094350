"""`orch explain` and `python3 -m remote_jobs.logs`: files, pipes, huge files at both ends, the oldest Python."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.main import main as orch
from orchestrator.core.errors import UsageError
from orchestrator.services.explain import explain, open_log, updates
from orchestrator.ui.explain import explain_lines
from remote_jobs.logs import explain_bytes
from remote_jobs.logs.source import explain_file

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "data" / "logs" / "cases"
REAL = CASES.parent / "real"
KV = CASES / "021_kv_cache_too_small_after_clean_load.log"
RAY = CASES / "009_ray_workerdict_prefix_repeated_across_cluster.log"


def oldest_python():
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which("python3.8"), *map(str, sorted(pyenv.glob("3.8.*/bin/python3.8")))]
    for path in filter(None, found):  # a pyenv shim may stand for nothing
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return sys.executable


def on_the_host(*args, stdin=None):
    """As the supervisor's child runs it: isolated, without site-packages."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from remote_jobs.logs.__main__ import main; sys.exit(main())"
    return subprocess.run([oldest_python(), "-I", "-S", "-c", code, *map(str, args)], input=stdin, capture_output=True, timeout=60)


def run_orch(capsys, *args):
    try:
        status = orch(list(map(str, args)))
    except SystemExit as leaving:
        status = leaving.code
    shown = capsys.readouterr()
    return status or 0, shown.out, shown.err


def test_the_oldest_python_gives_the_same_answer():
    done = on_the_host(KV)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == explain_bytes(KV.read_bytes())


def test_updates_and_exit_status_on_the_host():
    done = on_the_host(RAY, "--updates")
    assert [json.loads(line)["done"] for line in done.stdout.splitlines()] == [0, 1, 2, 3]
    done = on_the_host("-", "--exit-status", "-9", "--host-line", "oom-kill:constraint=X", stdin=RAY.read_bytes())
    assert json.loads(done.stdout)["failure"]["class"] == "host_oom"


def test_wrong_usage_on_the_host_is_said_in_one_line(tmp_path):
    done = on_the_host(tmp_path / "none.log")
    assert done.returncode == 2
    assert b"none.log: No such file" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_huge_file_is_read_at_both_ends_with_right_line_numbers(tmp_path):
    path = tmp_path / "log"
    head = b"(EngineCore pid=7) \rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.00s/it]\n"
    middle = b"INFO nothing here\n" * 300_000
    tail = b"Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    path.write_bytes(head + middle + tail)
    answer = explain_file(str(path), 1, head_bytes=4096, tail_bytes=4096)
    whole = explain_file(str(path), 1)
    assert answer["failure"]["root_cause"] == whole["failure"]["root_cause"] == {"line": 300_003, "text": "OSError: [Errno 28] No space left on device"}
    assert answer["bars"] == whole["bars"]


def test_a_log_with_a_punched_hole_is_read(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as out:
        out.write(b"first\n")
        out.seek(64 << 20)
        out.write(b"\nRuntimeError: CUDA error: out of memory\n")
    answer = explain_file(str(path), 1, head_bytes=1 << 16, tail_bytes=1 << 16)
    assert answer["failure"]["class"] == "gpu_oom"
    assert explain_file(str(path), 1)["failure"]["class"] == "gpu_oom"


def test_services_read_streams_in_pieces():
    class Dribble(io.RawIOBase):
        """A pipe that gives three bytes at a time."""

        def __init__(self, data):
            self.data = data

        def read(self, size=-1):
            piece, self.data = self.data[:3], self.data[3:]
            return piece

    data = RAY.read_bytes()
    assert explain(Dribble(data)) == explain_bytes(data)
    assert [update["done"] for update in updates(Dribble(data))] == [0, 1, 2, 3]
    with pytest.raises(UsageError) as failed, open_log("/no/such.log"):
        pass
    assert "/no/such.log" in failed.value.message
    assert failed.value.hint


def test_json_of_the_command_is_the_contract(capsys):
    status, out, _ = run_orch(capsys, "explain", KV, "--json")
    assert status == 0
    assert json.loads(out) == explain_bytes(KV.read_bytes())


def test_updates_of_the_command_are_one_object_a_line(capsys):
    status, out, _ = run_orch(capsys, "explain", RAY, "--updates")
    assert status == 0
    first = json.loads(out.splitlines()[1])
    assert first == {"line": 8, "seg": 1, "label": "Loading checkpoint shards", "done": 1, "total": 3, "percent": 33, "elapsed_s": 3, "remaining_s": 7, "s_per_item": 3.9}


def test_people_get_cause_lines_and_advice(capsys):
    status, out, _ = run_orch(capsys, "explain", KV)
    assert status == 0
    assert out.startswith("failed: kv_cache_too_small")
    assert "line 39: (EngineCore pid=7359) ERROR" in out
    assert "Lower max_model_len" in out
    assert "only after a change" in out


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("vllm032_cpu_port_in_use.log", "only after a change; in a job orch tries again by itself, a built-in step with another port ("),
        ("vllm026_h200_gpu_busy.log", "only after a change; in a job orch tries again by itself, once the GPUs are free ("),
        ("vllm032_cpu_max_model_len.log", "only after a change ("),
    ],
)
def test_what_asks_for_a_change_says_what_a_job_does_by_itself(capsys, log, words):
    """The runbook's "retried" is a job's; the same log at hand has nobody to make the change. The JSON's value stays."""
    assert words in run_orch(capsys, "explain", str(REAL / log))[1]
    assert json.loads(run_orch(capsys, "explain", str(REAL / log), "--json")[1])["failure"]["retry"] == "after_change"


def test_people_get_the_state_of_a_running_job():
    data = b"Starting to load model x\n" + b"".join(b"\rLoading safetensors checkpoint shards: %d%% Completed | %d/20 [%02d:%02d<00:10, 10.00s/it]\n" % (n * 5, n, n * 10 // 60, n * 10 % 60) for n in range(11))
    text = "\n".join(line.plain for line in explain_lines(explain_bytes(data)))
    assert text.startswith("no failure; Loading safetensors checkpoint shards: about 1m3")
    assert "confidence" in text
    assert "load_weights (running)" in text


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ('"done": 17, "total": 25', "count (running, 17/25 68%)"),
        ('"done": 17', "count (running, 17)"),
        ('"done": 17, "total": 0', "count (running, 17)"),
        ('"done": 30, "total": 25', "count (running, 30/25 100%)"),
        ('"total": 25', "count (running)"),
        ('"done": NaN, "total": Infinity', "count (running)"),
        ('"done": 1e999, "total": true', "count (running)"),
    ],
)
def test_people_get_how_far_a_phase_says_it_is(counts, words):
    data = b'::orch {"phase": "count", "state": "progress", %s}\n' % counts.encode()
    [line] = [line.plain for line in explain_lines(explain_bytes(data)) if line.plain.startswith("phases")]
    assert line == f"phases: {words}"


def test_a_missing_file_is_wrong_usage(capsys):
    status, _, err = run_orch(capsys, "explain", "/no/such.log")
    assert status == 2
    assert "cannot read the log /no/such.log" in err


def test_a_question_is_shown():
    text = "\n".join(line.plain for line in explain_lines(explain_bytes(b"Overwrite? [y/N] ")))
    assert "waiting_for_input" in text
    assert "line 1: Overwrite? [y/N]" in text
