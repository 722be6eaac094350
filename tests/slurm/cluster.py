"""A real Slurm in a folder: munge, slurmctld and one slurmd a node, all on this machine, no systemd and no cgroups.

Nodes are two slurmd with a port of their own; "the shared file system" is simply this machine's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from tests.support.jobdir import alive
from tests.support.waiting import PATIENCE, wait_until

GPUS = 4
CONF = """\
ClusterName=ci
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo={auth}cred_expire=5
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool.%n
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/slurmd.%n.pid
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobRequeue=1
MinJobAge={min_job_age}
KillWait=3
MessageTimeout=5
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_min_age_reserve=0
JobCompType=jobcomp/none
{accounting}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=short Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 OverTimeLimit=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A Slurm of `nodes`; a context manager that stops every daemon it started, by pid.

    Args:
        folder: created; everything lies in it.
        accounting: lines of slurm.conf about accounting (default: none, so `sacct` is off).
        min_job_age_s: how long slurmctld remembers an ended job.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str] = ("n1", "n2"),
        *,
        accounting: str = "AccountingStorageType=accounting_storage/none",
        min_job_age_s: int = 300,
        default_munge: bool = False,
    ) -> None:
        self.folder, self.nodes = folder, tuple(nodes)
        folder.mkdir(parents=True)
        for name in ("state", "munge"):
            (folder / name).mkdir(mode=0o755)
        self.socket = "/run/munge/munge.socket.2" if default_munge else str(folder / "munge" / "socket")
        self.conf = folder / "slurm.conf"
        self._started: list[int] = []
        host = socket.gethostname()
        lines = [f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 RealMemory=8000 Gres=gpu:{GPUS} State=UNKNOWN" for name in nodes]
        self.conf.write_text(
            CONF.format(
                d=folder, host=f"{host}(127.0.0.1)", port=free_port(), nodes="\n".join(lines), accounting=accounting,
                min_job_age=min_job_age_s, auth="" if default_munge else f"socket={self.socket},",
            )
        )  # fmt: skip
        devices = []
        for name in nodes:
            for index in range(GPUS):
                path = folder / f"{name}-gpu{index}"
                os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))  # copies of /dev/null
            devices.append(f"NodeName={name} Name=gpu File={folder}/{name}-gpu[0-{GPUS - 1}]")
        (folder / "gres.conf").write_text("\n".join(devices) + "\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    @property
    def environment(self) -> dict[str, str]:
        """What every Slurm command needs."""
        return {"SLURM_CONF": str(self.conf)}

    def __enter__(self) -> Self:
        self.start_munge()
        self.start_controller(clean=True)
        for node in self.nodes:
            self.start_node(node)
        wait_until(lambda: self.node_states() == ["idle"] * len(self.nodes), "every node is idle", within_s=20)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.run("scancel", "--quiet", "--user=root")
            wait_until(lambda: not self.run("squeue", "-h").strip(), "the queue is empty", within_s=8)
        for pid in reversed(self._started):
            self._end(pid)
        for path in [*self.folder.glob("spool.*/slurmstepd*")]:
            path.unlink()

    def start_munge(self) -> None:
        """A munged of our own, on our own socket unless Slurm's database daemon is to use it too."""
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        if self.socket.startswith("/run/munge"):
            Path("/run/munge").mkdir(exist_ok=True)
        base = self.folder / "munge"
        self._daemon(["munged", "--force", f"--key-file={key}", f"--pid-file={base}/pid", f"--log-file={base}/log", f"--seed-file={base}/seed", f"--socket={self.socket}"], base / "pid")  # fmt: skip

    def start_controller(self, *, clean: bool = False) -> None:
        """slurmctld, with the state it saved unless `clean`: then it forgets everything, its last job id too."""
        if clean:
            for path in (self.folder / "state").iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
        self._daemon(["slurmctld", *(["-c"] if clean else []), "-f", str(self.conf)], self.folder / "slurmctld.pid")

    def stop_controller(self) -> None:
        """End slurmctld; its pid file goes with it."""
        self._end(int((self.folder / "slurmctld.pid").read_text()))

    def start_node(self, name: str) -> None:
        """One slurmd."""
        self._daemon(["slurmd", "-N", name, "-c", "-f", str(self.conf)], self.folder / f"slurmd.{name}.pid")

    def _daemon(self, argv: list[str], pid_file: Path) -> None:
        pid_file.unlink(missing_ok=True)
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env={**os.environ, **self.environment, "PATH": PATH}, timeout=20, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr.decode()}"
        wait_until(lambda: pid_file.exists() and pid_file.read_text().strip().isdigit(), f"{argv[0]} has written {pid_file}")
        self._started.append(int(pid_file.read_text()))

    def _end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 8
            while alive(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
        if pid in self._started:
            self._started.remove(pid)

    def run(self, *argv: str, within_s: float = 15.0) -> str:
        """Run a Slurm command and return what it printed."""
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={**os.environ, **self.environment}, timeout=within_s * PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def node_states(self) -> list[str]:
        """State of every node, in order."""
        with contextlib.suppress(AssertionError):
            return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split()
        return []

    def node(self, name: str, state: str) -> None:
        """Set a node's state: down or resume."""
        self.run("scontrol", "update", f"nodename={name}", f"state={state}", *(["reason=test"] if state == "down" else []))

    def queue(self) -> dict[str, str]:
        """{job id: state} of the queue, ended jobs included."""
        return dict(line.split() for line in self.run("squeue", "-h", "--states=all", "-o", "%i %T").splitlines())

    @contextlib.contextmanager
    def full(self) -> Iterator[str]:
        """Every GPU taken by somebody's job while the block runs."""
        job = self.run("sbatch", "--parsable", "-N", str(len(self.nodes)), f"--gres=gpu:{GPUS}", "-o", "/dev/null", "--no-requeue", "--wrap", "sleep 600").strip()
        wait_until(lambda: self.queue().get(job) == "RUNNING", "the other job runs")
        try:
            yield job
        finally:
            self.run("scancel", job)
            wait_until(lambda: self.queue().get(job) != "RUNNING", "the other job has ended")


PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
