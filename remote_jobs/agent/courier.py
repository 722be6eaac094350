"""Delivery of one notification: a webhook or a command, tried for a quarter of an hour. Runs in a forked side task.

A courier may outlive its supervisor, so it first lets go of every file that the supervisor had open: GPU claims are held
by descriptors.  No address, header or variable of a target may reach an argv, a log or an error text.
Standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import subprocess
import time
from typing import Any, Callable, Dict, Mapping, Optional

from remote_jobs.agent import notices
from remote_jobs.agent.jobdir import JobDir

WAITS_S = (5.0, 30.0, 120.0, 300.0, 600.0)
"""Between tries; the last try is 18 minutes after the first."""
HTTP_TIMEOUT_S = 20.0
BUSY = frozenset({425, 429, 500, 502, 503})
"""Statuses by which a server says that it has not taken the message, and may later."""
COMMAND_TIMEOUT_S = 60.0


class Refused(Exception):
    """No further try: it would be answered the same way, or this one may have arrived in spite of the error."""


def deliver(
    job: JobDir,
    record: Mapping[str, Any],
    target: Mapping[str, Any],
    address: Mapping[str, str],
    env: Mapping[str, str],
    workdir: str,
) -> Dict[str, Any]:
    """Send a message and note in its record how that ended: {label, error: None or words without an address}."""

    def send() -> None:
        if target.get("kind") == "command":
            _run(str(target.get("command")), record, address, env, workdir)
        else:
            _post(record, target, address)

    _let_go()
    error = _until_taken(send)
    notices.settle(job, str(record["key"]), error, "supervisor")
    return {"label": target.get("label"), "error": error}


def end_heartbeat(job: JobDir, label: Any, url: str) -> Dict[str, Any]:
    """Tell a heartbeat's `end:` address that no more beats will come, or a healthy end becomes an alarm; as `deliver`.

    Not said any more of a job that was taken up again meanwhile: its alarm would sleep while it runs.
    """
    tries = itertools.count()

    def send() -> None:
        if next(tries) == 0 or os.path.exists(job.result_path):  # who takes a job up puts its result aside
            _http(url, None, {}, "POST")

    _let_go()
    return {"label": label, "error": _until_taken(send)}


def _until_taken(send: Callable[[], Any]) -> Optional[str]:
    """Try until the other side has it or will never take it; None, or words without an address."""
    import urllib.error

    error = None
    for wait_s in (*WAITS_S, None):
        try:
            send()
            return None
        except Refused as exc:
            return str(exc)
        except urllib.error.URLError as exc:  # not sent: a name that does not resolve, a refused connection, a busy server
            error = _plain(exc)
        except Exception as exc:
            return "{} (it may have arrived)".format(_plain(exc))
        if wait_s is not None:
            time.sleep(wait_s)
    return error


def ping(url: str) -> int:
    """Ask for a heartbeat address, once; the HTTP status.

    Raises:
        Refused, OSError: it did not answer, or with an error; the text holds no address.
    """
    _let_go()
    try:
        return _http(url, None, {}, "GET")
    except Refused:
        raise
    except Exception as exc:
        raise OSError(_plain(exc)) from None


def _let_go() -> None:
    """Close the regular files that came with the fork: claims, logs, the lock."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                if int(name) > 2 and stat.S_ISREG(os.fstat(int(name)).st_mode):
                    os.close(int(name))


def payload(record: Mapping[str, Any]) -> Dict[str, Any]:
    """JSON of a message. ``text`` and ``content`` are what chat services read (Slack, Mattermost; Discord)."""
    words = "{}\n{}".format(record.get("title"), record.get("text"))
    names = ("key", "kind", "job", "name", "host", "step", "attempt", "at", "seq", "class", "title")
    return {"schema": 1, **{name: record.get(name) for name in names}, "text": words, "content": words}


def _post(record: Mapping[str, Any], target: Mapping[str, Any], address: Mapping[str, str]) -> None:
    url = address.get("")
    if not url:
        raise Refused("its address is not known any more (it was deleted when the job had ended)")
    headers = {name[len("header ") :]: value for name, value in address.items() if name.startswith("header ")}
    if target.get("format") == "text":
        title = str(record.get("title")).encode("ascii", "replace").decode("ascii")
        headers = {"Content-Type": "text/plain; charset=utf-8", "Title": title, **headers}
        data = str(record.get("text")).encode("utf-8")
    else:
        headers = {"Content-Type": "application/json", **headers}
        data = json.dumps(payload(record)).encode("utf-8")
    _http(url, data, headers, "POST")


def _http(url: str, data: Optional[bytes], headers: Mapping[str, str], method: str) -> int:
    import urllib.error
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise Refused("its address is not an http(s) URL")
    request = urllib.request.Request(url, data=data, headers={"User-Agent": "orch", **headers}, method=method)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        exc.close()
        text = "HTTP {}".format(exc.code)
        if exc.code in BUSY:
            raise urllib.error.URLError(OSError(text)) from None
        raise Refused(text) from None


def _run(command: str, record: Mapping[str, Any], address: Mapping[str, str], env: Mapping[str, str], workdir: str) -> None:
    """Run a command of the plan: the message is in ORCH_NOTIFY_* and, as JSON, on its stdin."""
    given = {
        **os.environ, **env, "ORCH_NOTIFY_JOB": str(record.get("job")),
        **{
            "ORCH_NOTIFY_" + name.upper(): str(record.get(name) if record.get(name) is not None else "")
            for name in ("kind", "name", "host", "step", "attempt", "at", "title", "text")
        },
        **{name[len("env ") :]: value for name, value in address.items() if name.startswith("env ")},
    }  # fmt: skip
    done = subprocess.run(
        ["/bin/sh", "-c", command], input=json.dumps(payload(record)).encode("utf-8"), env=given,
        cwd=workdir if os.path.isdir(workdir) else "/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        timeout=COMMAND_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Refused("the command ended with exit status {}".format(done.returncode))


def _plain(exc: BaseException) -> str:
    """What went wrong, without the address that urllib may put into its message."""
    reason = getattr(exc, "reason", None)
    if isinstance(reason, OSError):
        exc = reason
    words = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno and exc.errno > 0 else ""
    if isinstance(exc, OSError) and not words and str(exc).startswith("HTTP "):
        words = str(exc)
    return words or type(exc).__name__
