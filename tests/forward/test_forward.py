"""`orch forward` on a real sshd: a job's HTTP service on a local port, over the connection that is there."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.services.forward import first_node, service_port
from tests.sshd.server import Sshd, free_port
from tests.support.jobdir import JobDir, agents, kill
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

SIZE = 20_000_000


class Site:
    """A host with a job whose service serves one big file, and a laptop."""

    def __init__(self, folder: Path, sshd: Sshd, **entry: object) -> None:
        self.root, self.work, self.sshd = folder / "root", folder / "work", sshd
        self.laptop = Laptop(folder / "laptop", {"box": sshd.inventory_entry(root=str(self.root), **entry)})
        self.work.mkdir()
        block = hashlib.sha256(b"orch").digest() * 1000
        (self.work / "big").write_bytes((block * (SIZE // len(block) + 1))[:SIZE])
        self.port = free_port()
        service = {
            "name": "web",
            "run": f"exec python3 -m http.server {self.port} --bind 127.0.0.1",
            "service": {"ready": {"http": f"http://127.0.0.1:{self.port}/"}, "timeout_s": 60},
        }
        user = {"name": "use", "run": "until [ -e end ]; do sleep 0.05; done", "needs": ["web"]}
        plan = self.laptop.plan([service, user], workdir=str(self.work))
        self.job = self.laptop.launch(plan)
        JobDir(self.root, self.job).wait_for_kind("step_ready")

    @contextlib.contextmanager
    def forwarded(self, *arguments: object) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        with self.laptop.started("forward", self.job, *arguments) as process:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            assert address, process.communicate()[1].decode()
            yield process, f"http://{address}"

    def end(self) -> None:
        (self.work / "end").touch()
        for path in (self.root / "jobs").glob("*"):
            JobDir(self.root, path.name).end_everything()
        for pid in agents(self.root):
            kill(pid)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("transport", ["paramiko", "openssh"])
def test_the_service_of_a_job_on_a_local_port(sshd: Sshd, tmp_path: Path, transport: str) -> None:
    site = Site(tmp_path, sshd, transport=transport)
    try:
        before = sshd.connections()
        with site.forwarded() as (process, url):
            assert url != f"http://127.0.0.1:{site.port}", "that one is taken: host and laptop are the same machine"
            with ThreadPoolExecutor(6) as pool:
                bodies = list(pool.map(get, [f"{url}/big"] * 6))
            assert {hashlib.sha256(body).hexdigest() for body in bodies} == {
                hashlib.sha256((site.work / "big").read_bytes()).hexdigest()
            }
            if transport == "paramiko":
                assert sshd.connections() - before == 1, "everything went over the one connection"
            (site.work / "end").touch()  # the job ends: so does the forwarding
            assert process.wait(60) == 0
            assert process.stderr is not None
            assert "nothing is forwarded any more" in process.stderr.read().decode()
        with pytest.raises(OSError):
            get(url)
        over = site.laptop.run("forward", site.job, expect=2)
        assert "the service web of job" in over.err
    finally:
        site.end()


def test_what_a_host_forbids_or_has_not_is_said(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd", options={"AllowTcpForwarding": "no"}) as sshd:
        site = Site(tmp_path / "a", sshd)
        try:
            refused = site.laptop.run("forward", site.job, expect=3)
            assert "forbids port forwarding" in refused.err
            assert refused.one_screen
            assert site.laptop.run("forward", site.job, "--step", "wbe", expect=2).err.count("did you mean 'web'") == 1
        finally:
            site.end()
        sshd.options["AllowTcpForwarding"] = "local"
        sshd.restart()
        other = Site(tmp_path / "b", sshd)
        try:
            nothing = free_port()
            with other.forwarded(nothing, "--local", 0) as (process, url):
                with pytest.raises(OSError):
                    get(url)
                server = subprocess.Popen(
                    ["python3", "-m", "http.server", str(nothing), "--bind", "127.0.0.1"],
                    cwd=other.work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                try:

                    def listing() -> bytes:
                        with contextlib.suppress(OSError):
                            return get(url)
                        return b""

                    assert b"big" in wait_until(listing, "the service that came later is reached")
                finally:
                    server.kill()
                    server.wait()
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 130
                assert process.stderr is not None
                said = process.stderr.read().decode()
                assert said.count(f"nothing answers on 127.0.0.1:{nothing} there") == 2, said  # at first, and once more
                assert "Traceback" not in said
        finally:
            other.end()


def test_the_node_of_a_slurm_job() -> None:
    def node(*texts: str) -> str:
        return first_node({"notes": [{"at": "", "text": text} for text in texts]})

    assert node("runs as Slurm job 12 on gpu1", "something else") == "gpu1"
    assert node("runs as Slurm job 12 on gpu1", "runs as Slurm job 13 on a-[03-04,07], requeued") == "a-03"
    assert node("runs as Slurm job 12 on gpu1,gpu2") == "gpu1"
    assert node() == "127.0.0.1"


def test_the_port_of_a_service() -> None:
    def port(spec: dict[str, object], **attempt: object) -> int | None:
        return service_port(spec, {"attempts": [attempt] if attempt else []})

    assert port({"uses": "serve", "params": {}}) == 8000
    assert port({"uses": "serve", "params": {"port": 9000}}) == 9000
    assert port({"uses": "serve", "params": {"port": 9000}}, changes={"port": 9123}) == 9123
    assert port({"uses": "serve", "params": {"port": 9000}}, changes=None) == 9000
    assert port({"run": "x", "service": {"ready": {"http": "http://localhost:81/health"}}}) == 81
    assert port({"run": "x", "service": {"ready": {"http": "https://localhost/health"}}}) == 443
    assert port({"run": "x", "service": {"ready": {"port": 5}}}) == 5
    assert port({"run": "x", "service": {"ready": {"log": "up"}}}) is None
