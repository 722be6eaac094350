"""dask's SSHCluster: scheduler and one worker on the host, started over ssh; the job is a subprocess of a task."""

import subprocess
import sys

import asyncssh
import dask
from driving import ready, say, start

verb, config = start()


def work(argv):
    """Runs in the worker; a job that was killed raises."""
    return subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode


def main():
    """One life of a controller."""
    from distributed import Client, SSHCluster

    if verb == "attach":  # the scheduler's address is all that an earlier life leaves
        try:
            with Client((config.folder / f"scheduler-{config.work.name}").read_text(), timeout=10) as client:
                kept = client.list_datasets()
                say(f"ended gave-up the scheduler answers, but futures went with their client; kept: {list(kept)}")
        except Exception as error:
            say(f"ended gave-up {type(error).__name__}")
        return
    dask.config.set({"temporary-directory": str(config.folder)})  # the host's side takes it over
    ready()
    options = {
        "port": config.port, "username": config.user, "client_keys": [config.key], "known_hosts": config.known_hosts,
        "config": None,
    }  # fmt: skip
    cluster = SSHCluster(
        [config.address, config.address], connect_options=options, remote_python=sys.executable,
        scheduler_options={"host": config.address, "port": 0, "dashboard": False},
        worker_options={"host": config.address, "nthreads": 1},
    )  # fmt: skip
    (config.folder / f"scheduler-{config.work.name}").write_text(cluster.scheduler_address)
    with cluster, Client(cluster) as client:
        future = client.submit(work, config.argv, pure=False)
        try:
            future.result()
            say("ended ok")
        except subprocess.CalledProcessError as error:
            say(f"ended failed exit status {error.returncode}")
        except Exception as error:
            say(f"ended gave-up {type(error).__name__} {str(error)[:120]!r}")


if __name__ == "__main__":
    assert asyncssh
    main()
