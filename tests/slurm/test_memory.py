"""What Slurm forgets: ended jobs after a while, ids for ever. With accounting it is asked, without it our directory tells."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PATH, Cluster, free_port
from tests.slurm.conftest import JOB, Login, events_of, submissions, until, view
from tests.slurm.test_ends import ONCE
from tests.support.host_side import attempts
from tests.support.waiting import wait_until


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="orch-slurm-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def die_unseen(cluster: Cluster, login: Login) -> str:
    """A job whose batch script is killed while nobody looks, until Slurm's controller has forgotten it; its id."""
    agent = login.agent()
    job = login.launch(agent, [{"name": "work", "run": ONCE}])
    wait_until((login.work / "up").exists, "the step runs")
    job.wait_for_kind("attempt_started")
    agent.close()
    os.kill(job.supervisor, signal.SIGKILL)
    [number] = submissions(job)
    wait_until(lambda: number not in cluster.queue(), "Slurm has forgotten the job", within_s=90, every_s=0.2)
    return number


def test_without_accounting_and_with_ids_used_again(short_folder: Path, tmp_path: Path) -> None:
    """Forgotten by a Slurm without accounting, a job is known by its directory; an id handed out again is not ours."""
    with Cluster(short_folder / "s", nodes=("n1",), min_job_age_s=2) as cluster, Login(tmp_path / "login", cluster) as login:
        die_unseen(cluster, login)
        agent = login.agent()
        until(agent, "succeeded", within_s=30)
        assert [state for state, _ in attempts(agent, JOB)] == ["lost", "succeeded"]
        [lost] = [item for item in view(agent)["steps"][0]["attempts"] if item["state"] == "lost"]
        assert lost["verdict"]["signature"] == "slurm_gone"

        job = login.launch(agent, "touch ran", JOB + "b", slurm={"sbatch": ["--hold"]})
        [number] = submissions(job)
        until(agent, "queued", JOB + "b")
        cluster.stop_controller()
        cluster.start_controller(clean=True)
        wait_until(lambda: cluster.node_states() == ["idle"], "the node is back", within_s=20)
        theirs = ""
        while theirs != number:
            theirs = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit 1").strip()
        wait_until(lambda: view(agent, JOB + "b") and len(submissions(job)) == 2, "ours is submitted again", within_s=30)
        assert not events_of(job, "step_failed")
        cluster.run("scontrol", "release", submissions(job)[1])
        until(agent, "succeeded", JOB + "b")


class Database:
    """MariaDB and slurmdbd for one cluster."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Both daemons; slurmdbd keeps trying until the database answers."""
        data, socket = self.folder / "my", Path("/run/mysqld/mysqld.sock")  # where slurmdbd's library looks
        socket.parent.mkdir(exist_ok=True)
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "PATH": PATH}}
        subprocess.run(["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--auth-root-authentication-method=normal", "--skip-test-db"], check=True, **quiet)  # type: ignore[call-overload]
        self.processes.append(subprocess.Popen(["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket}", "--skip-networking", "--innodb-buffer-pool-size=64M"], **quiet))  # type: ignore[call-overload]
        sql = "create database slurm_acct_db; create user slurm@localhost identified by 'x'; grant all on slurm_acct_db.* to slurm@localhost;"
        wait_until(lambda: subprocess.run(["mariadb", "--no-defaults", f"--socket={socket}", "-u", "root", "-e", sql], check=False, **quiet).returncode == 0, "the database answers")  # type: ignore[call-overload]
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(
            f"AuthType=auth/munge\nDbdHost=localhost\nDbdPort={self.port}\nSlurmUser=root\nStorageType=accounting_storage/mysql\nStorageHost=localhost\n"
            f"StorageUser=slurm\nStoragePass=x\nStorageLoc=slurm_acct_db\nLogFile={self.folder}/slurmdbd.log\nPidFile={self.folder}/slurmdbd.pid\n"
        )
        conf.chmod(0o600)
        env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self.processes.append(subprocess.Popen(["slurmdbd", "-D"], **{**quiet, "env": env}))  # type: ignore[call-overload]
        log = self.folder / "slurmdbd.log"
        wait_until(lambda: log.exists() and "started" in log.read_text(), "slurmdbd has started")

    def stop(self) -> None:
        """End both, slurmdbd first."""
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_with_accounting_sacct_tells_how_a_forgotten_job_ended(short_folder: Path, tmp_path: Path) -> None:
    """The controller has forgotten, the database has not: NODE_FAIL is known long afterwards (MariaDB and slurmdbd)."""
    port = free_port()
    accounting = f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost\nAccountingStoragePort={port}"
    cluster = Cluster(short_folder / "s", nodes=("n1",), accounting=accounting, min_job_age_s=2, default_munge=True)
    database = Database(short_folder / "s", port)
    try:
        cluster.start_munge()
        database.start()
        cluster.start_controller(clean=True)
        cluster.start_node("n1")
        wait_until(lambda: cluster.node_states() == ["idle"], "the node is idle", within_s=30)
        with Login(tmp_path / "login", cluster) as login:
            agent = login.agent()
            task = JOB + "t"  # the only one of an array
            runs = {JOB: (ONCE, {}), task: (ONCE.replace("second up", "second-t up-t").replace("second &", "second-t &"), {"array": [task]})}
            jobs = {one: login.launch(agent, [{"name": "work", "run": run}], one, slurm=slurm) for one, (run, slurm) in runs.items()}
            wait_until(lambda: all((login.work / file).exists() for file in ("up", "up-t")), "the steps run")
            for job in jobs.values():
                job.wait_for_kind("attempt_started")
            agent.close()
            numbers = {one: submissions(job)[0] for one, job in jobs.items()}
            assert numbers[task].endswith("_1")
            cluster.node("n1", "down")
            wait_until(lambda: not set(numbers.values()) & set(cluster.queue()), "the controller has forgotten the jobs", within_s=90, every_s=0.2)
            cluster.node("n1", "resume")
            agent = login.agent()
            for one, number in numbers.items():
                until(agent, "succeeded", one, within_s=40)
                [lost, _] = view(agent, one)["steps"][0]["attempts"]
                assert lost["verdict"]["signature"] == "slurm_node_fail"
                assert f"Slurm job {number}: " in lost["verdict"]["summary"]
    finally:
        cluster.__exit__()
        database.stop()
