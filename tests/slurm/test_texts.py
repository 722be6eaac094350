"""What Slurm prints and what we print for it, without a cluster: pure functions on recorded texts."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from remote_jobs import protocol
from remote_jobs.agent.slurm import client, queue, script, verdicts
from remote_jobs.agent.slurm.allocation import gpu_indices, job_id, made_progress
from remote_jobs.logs import explain_bytes

SQUEUE = """\
17|orch-plan-20261129-abcdef.1|PENDING|1795981877|1795985477|1796072000||n[1-2]|Resources
18|orch-plan-20261129-ghijkl.2|RUNNING|1795981877|1795981878|1796072000|n1|(null)|None
19|wrap|COMPLETED|1795981877|1795981878|1795981878|n2|(null)|None
20|orch-x.1|PENDING|1795981877|N/A|N/A||(null)|(ReqNodeNotAvail, UnavailableNodes:n2)
24_[1-3,7-9:2%2]|orch-y.array|PENDING|1795981877|N/A|N/A||(null)|JobArrayTaskLimit
24_4|orch-y.array|RUNNING|1795981877|1795981878|1796072000|n1|(null)|None
garbage
"""


def test_squeue_is_read() -> None:
    """Times are numbers or unknown, the planned nodes stand in for the given ones, other lines are left out."""
    rows = queue.parse_squeue(SQUEUE)
    assert [row.id for row in rows] == ["17", "18", "19", "20", "24_1", "24_2", "24_3", "24_7", "24_9", "24_4"]
    assert (rows[0].start, rows[0].nodes, rows[0].waiting) == (1795985477.0, "n[1-2]", True)
    assert (rows[1].nodes, rows[1].ended) == ("n1", False)
    assert (rows[3].start, rows[3].nodes) == (None, "")
    assert "a node it needs is down" in queue.reason_words(rows[3])
    assert queue.reason_words(rows[0]) == "Resources (nodes or GPUs are not free yet)"
    assert (rows[4].array, rows[4].task, rows[0].task) == ("24", 1, None)
    assert "array_limit" in queue.reason_words(rows[4])


def test_the_task_of_an_array_is_found_by_its_number_and_missed_in_its_array() -> None:
    """All tasks share a name; one that was cancelled while it waited leaves no row, or the whole array's."""
    rows, at = queue.parse_squeue(SQUEUE), 1795981877.0
    lost = queue.ours(rows, None, "orch-y.array", at, 4)
    assert lost is not None
    assert lost.id == "24_4"
    assert queue.ours(rows, None, "orch-y.array", at) is None, "not every task's"
    assert queue.left_its_array(rows, "24_5", "orch-y.array", at)
    assert not queue.left_its_array(rows, "24_4", "orch-y.array", at)
    assert not queue.left_its_array(rows, "25_5", "orch-y.array", at)
    assert not queue.left_its_array(rows, "24_5", "orch-y.array", at + 3600), "an older array with the same id"
    assert not queue.left_its_array(rows, "17", "orch-plan-20261129-abcdef.1", at)
    whole = queue.parse_squeue("24|orch-y.array|CANCELLED|1795981877|1|1||(null)|None\n")
    assert queue.left_its_array(whole, "24_5", "orch-y.array", at)


def test_sacct_is_read_and_recycled_ids_are_told_apart() -> None:
    """Id, name and submit time must all be ours; steps of a job are no jobs."""
    text = "17|orch-a.1|CANCELLED by 1000|1795981877|1795981878|1795981900|n1|None\n17.batch|batch|CANCELLED|1|1|1|n1|\n17|other|FAILED|1500000000|1|1|n9|None\n"
    rows = queue.parse_sacct(text)
    assert [row.state for row in rows] == ["CANCELLED", "FAILED"]
    assert queue.ours(rows, "17", "orch-a.1", 1795981877.0) is rows[0]
    assert queue.ours(rows, "17", "orch-b.1", 1795981877.0) is None
    assert queue.ours(rows, "17", "orch-a.1", 1795999999.0) is None, "submitted before ours"
    assert queue.ours(rows, None, "orch-a.1", 1795981877.0) is rows[0]


@pytest.mark.parametrize(
    ("state", "klass", "retry"),
    [
        ("NODE_FAIL", "killed", "yes"),
        ("PREEMPTED", "killed", "yes"),
        ("TIMEOUT", "killed", "yes"),
        ("BOOT_FAIL", "killed", "yes"),
        ("OUT_OF_MEMORY", "host_oom", "after_change"),
        ("DEADLINE", "config", "no"),
        ("FAILED", "killed", "yes"),
        ("GONE", "killed", "yes"),
    ],
)
def test_every_end_has_a_verdict(state: str, klass: str, retry: str) -> None:
    """Slurm's states in our classes, with the nodes named."""
    found = verdicts.of_end(queue.Row("7", "orch-a.1", state, nodes="n2"))
    assert (found["class"], found["retry"], found["signature"]) == (klass, retry, "slurm_" + state.lower())
    assert "nodes: n2" in found["evidence"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("8:00:00", 28800), ("2-0", 172800), ("1-2:30", 95400), ("1-0:0:5", 86405), ("UNLIMITED", None), ("", None)],
)
def test_time_limits(text: str, seconds: float | None) -> None:
    """As `sbatch --time` reads them."""
    assert script.seconds(text) == seconds


def spec(steps: list[protocol.StepSpec], **slurm: object) -> protocol.JobSpec:
    """A job for Slurm on nodes of 8 GPUs."""
    return protocol.JobSpec(
        id="a", name="a", host="c", workdir="/w", plan_sha256="0", created_at="", release="", host_gpus=8,
        steps=[protocol.to_dict(step) for step in steps], slurm=dict(slurm),
    )  # fmt: skip


def test_the_command_line_of_sbatch() -> None:
    """Options of the inventory, GPUs for what may run together, and a signal early enough to save."""
    steps = [
        protocol.StepSpec("serve", uses="serve", gpus=2),
        protocol.StepSpec("generate", uses="generate", needs=["serve"]),
        protocol.StepSpec("extract", uses="extract", gpus=4, needs=["generate"]),
        protocol.StepSpec("train", uses="train", gpus=16, nodes=2, needs=["extract"]),
    ]
    argv = script.sbatch_argv(spec(steps, partition="gpu", time_limit="8:00:00", sbatch=["--mem=0"]), "orch-a.1", "/j/script", "/j/100%/out")
    assert argv[-2:] == ["--mem=0", "/j/script"]
    assert {"--no-requeue", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu", "--time=8:00:00"} < set(argv)
    assert "--output=/j/100%%/out" in argv
    assert "--signal=B:USR2@195" in argv  # train: 130 s to save, 5 s to die, and our minute
    of_array = script.sbatch_argv(spec(steps, array_limit=2), "n", "s", "o", tasks=[1, 2, 3, 5])
    assert "--array=1-3,5%2" in of_array
    together = [protocol.StepSpec("a", run="x", gpus=2), protocol.StepSpec("b", run="x", gpus=3)]
    assert script.gpus_per_node(spec(together)) == 5
    assert "--gres=gpu:h100:5" in script.sbatch_argv(spec(together, gres="gpu:h100"), "n", "s", "o")
    assert "--gres=gpu:2,nvme" in script.sbatch_argv(spec(together, gres="gpu:2,nvme"), "n", "s", "o")


def test_a_signal_before_the_supervisor_is_up_does_not_end_the_job(tmp_path: Path) -> None:
    """Slurm may send the signal of a near limit a minute early: to a Python that has no handler yet."""
    file = tmp_path / "script"
    file.write_text(script.batch_script(["sh", "-c", "echo up; read line; echo over"]))
    with subprocess.Popen(["sh", str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
        assert process.communicate("go\n")[0] == "over\n"
    assert process.returncode == 0


def test_node_lists_and_gpus_of_an_allocation() -> None:
    """Slurm's short forms."""
    assert script.first_hosts("gpu[01-03,07],login1") == ("gpu01", "gpu02", "gpu03", "gpu07", "login1")
    assert gpu_indices({"CUDA_VISIBLE_DEVICES": "2,3"}, 8) == [2, 3]
    assert gpu_indices({"CUDA_VISIBLE_DEVICES": "GPU-uuid", "SLURM_GPUS_ON_NODE": "2"}, 8) == [0, 1]
    assert gpu_indices({}, 4) == [0, 1, 2, 3]
    assert job_id({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}) == "7_2"
    assert (job_id({"SLURM_JOB_ID": "9"}), job_id({})) == ("9", "?")


def test_progress_since_the_allocation_began() -> None:
    """More than any attempt before it kept, or a step that ended well."""

    def judged(seq: int, progress: int) -> dict[str, object]:
        return {"seq": seq, "kind": "attempt_judged", "step": "w", "data": {"progress": progress}}

    assert not made_progress([judged(1, 5), judged(9, 5)], 5)
    assert made_progress([judged(1, 5), judged(9, 6)], 5)
    assert made_progress([{"seq": 9, "kind": "step_succeeded", "step": "w", "data": {}}], 5)
    assert not made_progress([{"seq": 3, "kind": "step_succeeded", "step": "w", "data": {}}], 5)


def test_rank_prefixes_of_many_nodes() -> None:
    """`srun --label` in front of torchrun's and vLLM's own prefixes: each node's bar is one of its own."""
    log = b"".join(b"%d: Extracting hidden states:  %d%%|#| %d/100 [00:10<00:10,  5.00it/s]\n" % (rank, done, done) for done in (10, 50) for rank in range(12))
    bars = explain_bytes(log)["bars"]
    assert {bar["worker"] for bar in bars} == {str(rank) for rank in range(12)}
    assert {bar["done"] for bar in bars} == {50}


def test_what_a_task_submits_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch --export=ALL` hands the environment on: a follow-on must not look like the task or the restart that made it."""
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    names = {line.partition("=")[0] for line in client.call(["env"]).splitlines()}
    assert "SLURM_CONF" in names
    assert not {name for name in names if name.startswith(("SLURM_ARRAY", "SLURM_RESTART", "SLURM_JOB", "SBATCH"))}
