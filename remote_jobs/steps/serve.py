"""The serve step: `vllm serve` until somebody stops it, ready when it really answers.

    python serve.py --model FOLDER [--port N] [any flag of vllm serve]

Ready means: /health answers and one token was generated. Then `endpoint.json` {"url", "model", "pid"} lies in the output
folder and the marker `{"phase": "serve", "state": "ready"}` is printed. On SIGTERM every process of the server is ended,
engine and workers too: during a load vLLM loses the first SIGTERM, and its engine outlives a killed API process.
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from remote_jobs.agent import procs
from remote_jobs.steps import entry, vllm_limits
from remote_jobs.steps.ending import end_everything
from remote_jobs.steps.extraction.errors import ConfigError, StepError
from remote_jobs.steps.extraction.model import read_model
from remote_jobs.steps.extraction.progress import Progress
from remote_jobs.steps.extraction.sample_file import write_atomically
from remote_jobs.steps.extraction.stop import Interrupted, StopSignal

ENDPOINT = "endpoint.json"
DEFAULT_PORT = 8000
POLL_S = 0.5
WATCH_S = 5.0
SICK_LIMIT_S = 120.0
"""A ready server whose /health has not answered for this long is ended: it hangs."""
REQUEST_TIMEOUT_S = 120.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Never through the host's http_proxy: the server is on this machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; returns the exit status (0: stopped when asked to)."""
    return entry.run("serve", lambda progress: serve(*_parse(argv), progress))


def serve(args: argparse.Namespace, flags: list[str], progress: Progress) -> int:
    """Start the server, wait until it is ready, watch it until it ends or a signal comes."""
    folder = os.path.abspath(os.path.expanduser(args.output))
    os.makedirs(folder, exist_ok=True)
    endpoint = os.path.join(folder, ENDPOINT)
    entry.remove(endpoint)  # of a former run: nobody may find a dead server
    stop = StopSignal()
    procs.become_subreaper()  # an engine whose API process died becomes our child and can be ended
    with stop.installed():
        with progress.phase("load_config"), stop.raising():
            _check(args.model, progress)
            entry.put_patches_in_force(progress)
            port = args.port or _free_port(args.host)
            limit_s = args.ready_timeout_s or vllm_limits.load_limit_s(
                vllm_limits.checkpoint_bytes(args.model)
            )
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", args.model]
            command += ["--host", args.host, "--port", str(port)]
            for name, value in vllm_limits.limit_flags(limit_s).items():
                flag = "--" + name.replace("_", "-")
                command += [] if any(word.split("=")[0] == flag for word in flags) else [flag, value]
            env = {**os.environ, **vllm_limits.limit_env(limit_s)}
            progress.say(f"Starting {' '.join(command + flags)} (ready within {limit_s} s)")
        server = subprocess.Popen(command + flags, env=env, stdin=subprocess.DEVNULL)
        url = f"http://{_reachable(args.host)}:{port}"
        ready = False
        try:
            model = _wait_until_ready(server, url, limit_s, stop)
            facts = {"url": url, "model": model, "pid": server.pid}
            write_atomically(endpoint, json.dumps(facts).encode() + b"\n")
            ready = True
            progress.mark("serve", "ready", url=url)
            progress.say(f"Ready: {model} at {url}")
            return _watch(server, url, stop)
        except Interrupted as stopped:
            progress.say(f"serve: {stopped}; ending the server and its engine")
            return 0
        finally:
            entry.remove(endpoint)
            left = end_everything(server.pid if ready else None)
            if left:
                progress.say(f"serve: these processes would not end: {', '.join(map(str, left))}")


def _check(model: str, progress: Progress) -> None:
    """Find damaged shards before the load does; anything this cannot judge (hub ids, odd configs) is vLLM's business."""
    if not os.path.isdir(model):
        return
    try:
        facts = read_model(model)
    except ConfigError as error:
        progress.say(f"Note: {error}")
        return
    progress.say(
        f"{model}: {len(facts.shards)} shards, all whole; {facts.num_hidden_layers} layers of {facts.hidden_size}"
    )


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, limit_s: float, stop: StopSignal) -> str:
    """Model id of the ready server.

    Raises:
        StepError: it ended, or was not ready in time.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        stop.check()
        status = server.poll()
        if status is not None:
            raise StepError(
                f"vllm serve ended with exit status {status} before it was ready; the reason is further up"
            )
        if healthy(url):
            with stop.raising():
                return first_token(url)
        time.sleep(POLL_S)
    raise StepError(
        f"the server was not ready within {limit_s:.0f} s", hint="--ready-timeout-s raises the limit"
    )


def healthy(url: str) -> bool:
    """True when /health answers 200."""
    try:
        with DIRECT.open(url + "/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def served_model(url: str) -> str:
    """Id of the model that a server serves."""
    return str(_json(url + "/v1/models", None)["data"][0]["id"])


def first_token(url: str) -> str:
    """Generate one token, the proof that engine and workers answer; returns the served model's id.

    Raises:
        StepError: the server answered with an error.
    """
    try:
        model = served_model(url)
        _json(url + "/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})
    except (OSError, ValueError, LookupError) as error:
        detail = (
            error.read().decode("utf-8", "replace")[:400] if isinstance(error, urllib.error.HTTPError) else ""
        )
        raise StepError(
            f"the server is up but a one-token request failed: {error} {detail}".rstrip()
        ) from error
    return model


def _watch(server: subprocess.Popen[bytes], url: str, stop: StopSignal) -> int:
    """Wait for the server's end; its exit status, never 0: a service that ends by itself has failed."""
    sick_since: float | None = None
    asked = time.monotonic()
    while True:
        stop.check()
        status = server.poll()
        if status is not None:
            raise StepError(f"vllm serve ended by itself with exit status {status}; the reason is further up")
        now = time.monotonic()
        if now - asked >= WATCH_S:
            asked = now
            sick_since = None if healthy(url) else sick_since or now
            if sick_since is not None and now - sick_since > SICK_LIMIT_S:
                raise StepError(f"/health has not answered for {SICK_LIMIT_S:.0f} s: the server hangs")
        time.sleep(0.2)


def _json(url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own http URL
    with DIRECT.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
        return json.load(answer)


def _free_port(host: str) -> int:
    """Port 8000 when it is free, as people expect of vLLM, else any free one."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigError(f"no port can be bound on {host}")


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in {"", "0.0.0.0", "::"} else host  # noqa: S104 - read, not bound


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any other flag goes to vllm serve as it is: --tensor-parallel-size 8, --max-model-len 32768, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="checkpoint folder, or a repository id of the hub")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="default: 8000, or another free one when that is taken"
    )
    parser.add_argument("--output", default=entry.default_output("serve"), help="folder of endpoint.json")
    parser.add_argument("--ready-timeout-s", type=int, default=0, help="default: from the checkpoint's size")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
