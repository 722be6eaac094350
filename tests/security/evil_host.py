"""A hostile host: it takes the place of `ssh` on the PATH, speaks the agent's protocol, and lies.

`transport: openssh` starts it as it would start OpenSSH, so the whole controller is the real one. ORCH_EVIL names what
to do; ORCH_REAL_SSH is asked for `ssh -G`. Standard library only; runs as a script.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

NAME = "evil-20261129-abcdef"
ESCAPES = (
    "\x1b]0;PWNED-TITLE\x07"  # window title
    "\x1b]52;c;UFdORUQ=\x1b\\"  # clipboard
    "\x1b]8;;http://evil.example/\x1b\\click\x1b]8;;\x1b\\"  # hyperlink
    "\x1b[5;41mblink\x1b[2J\x1b[6n"  # style, clear, ask for the cursor's place
    "\x1bP+q544e\x1b\\\x1b_apc\x1b\\\x1b^pm\x1b\\\x1bc"  # DCS, APC, PM, full reset
    "\x9b31m\x9d0;c1\x9c\x90q\x9c"  # the same as C1 characters
    "\x1b\x1b[5;41m[5;41m\x1b\x1b]0;x\x07]0;PWNED-TITLE\x07"  # what is left when one is taken out
    "\a\b\v\f\r\x0e\x0f\x7f\x00"
    "\u202eevil\u202c\u2066x\u2069\u061c\u200f"  # bidi
)
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'><svg/onload=alert(1)>"
POISON = f"p{ESCAPES}{MARKUP}q"


def hello() -> dict[str, Any]:
    return {
        "v": 1, "release": POISON, "python": POISON, "hostname": POISON, "boot_id": POISON, "uid": 0, "user": POISON,
        "home": "/" + POISON, "root": "/" + POISON, "root_fs": POISON, "tmpfs": False, "container": False, "pid": 1,
        "now": "2026-11-29T20:00:00.000Z", "wall": time.time(), "mono": 1.0,
    }  # fmt: skip


def attempt(**more: Any) -> dict[str, Any]:
    verdict = {
        "class": POISON, "retry": "no", "root_cause": {"line": 3, "text": POISON}, "signature": POISON,
        "summary": POISON, "advice": POISON, "evidence": [POISON, f"line 3: {POISON}"],
    }  # fmt: skip
    bar = {
        "label": POISON, "instance": 1, "worker": POISON, "pid": 1, "done": 3, "total": 9, "percent": 33,
        "elapsed_s": 3, "remaining_s": 6, "s_per_item": 1.0, "eta_s": 6.0, "eta_low_s": 5.0, "eta_high_s": 9.0,
        "line": 1, "seg": 0,
    }  # fmt: skip
    process = {"pid": 7, "ppid": 1, "user": POISON, "state": "R", "cpu_pct": 3.0, "rss_mib": 5.0, "command": POISON}
    return {
        "n": 1, "state": "running", "started_at": "2026-11-29T20:00:00.000Z", "ended_at": None, "exit_status": None,
        "verdict": verdict, "phases": [{"name": POISON, "state": "running", "started_at": "2026-11-29T20:00:00.000Z"}],
        "bars": [bar], "processes": [process], "pid": 7, "changes": {POISON: {"from": POISON, "to": POISON}}, "gpus": [0],
        **more,
    }  # fmt: skip


def job(state: str, step_state: str, **more: Any) -> dict[str, Any]:
    step = {
        "name": POISON, "uses": POISON, "state": step_state, "waiting": POISON, "retry_at": None, "needs": [POISON],
        "attempts": [attempt(state="failed" if state == "failed" else "running")],
    }  # fmt: skip
    if state == "failed":
        step["attempts"][0] |= {"ended_at": "2026-11-29T20:01:00.000Z", "exit_status": 1}
    return {
        "state": {
            "v": 1, "id": NAME, "name": POISON, "state": state, "seq": 5, "created_at": "2026-11-29T20:00:00.000Z",
            "started_at": "2026-11-29T20:00:00.000Z", "ended_at": None, "eta": None, "stop_requested": False,
            "steps": [step], "notes": [{"at": None, "text": POISON}],
        },
        "alive": True, "lost": None, "unfinished": False,
        "spec": {"name": POISON, "host": POISON, "plan_sha256": POISON, "created_at": POISON, "workdir": "/" + POISON},
        **more,
    }  # fmt: skip


def look(request: dict[str, Any]) -> dict[str, Any]:
    import base64

    jobs = {NAME: job("running", "running"), "lost-20261129-abcdef": job("lost", "lost", lost={"reason": POISON, "processes": [{"pid": POISON}]})}
    if request.get("wait_s"):
        time.sleep(min(0.3, float(request["wait_s"])))
    if os.environ.get("ORCH_EVIL_OVER"):
        jobs = {NAME: job("failed", "failed")}
    wanted = request.get("jobs")
    logs = []
    for cursor in request.get("logs") or []:
        data = f"{POISON}\n100%|{POISON}| 3/9\r{POISON}".encode()
        start = max(0, int(cursor.get("offset", 0)))
        logs.append(
            {"job": cursor["job"], "step": cursor["step"], "attempt": 1, "inode": 5, "offset": min(start, len(data)), "end": len(data),
             "size": len(data), "data_b64": base64.b64encode(data[start:]).decode(), "skipped_bytes": 0, "caught_up": True,
             "rotated": False, "missing": False}
        )  # fmt: skip
    return {
        "now": "2026-11-29T20:00:00.000Z", "wall": time.time(), "mono": 2.0, "logs": logs, "disk": None,
        "jobs": {name: record for name, record in jobs.items() if wanted is None or name in wanted},
        "unreadable": {POISON: POISON} if wanted is None else {}, "gpus": {**gpus(), "age_s": 1.0} if request.get("gpus") else None,
    }  # fmt: skip


def gpus() -> dict[str, Any]:
    process = {"pid": 9, "name": POISON, "memory_mib": 5, "kind": "compute", "owner": POISON}
    gpu = {
        "index": 0, "uuid": POISON, "name": POISON, "memory_used_mib": 5, "memory_total_mib": 9, "utilization_pct": 3,
        "processes": [process], "health": POISON, "clean": False, "why": POISON,
    }  # fmt: skip
    holder = {"pid": 9, "since_s": 5.0, "command": POISON, "why": POISON}
    return {"schema": 1, "gpus": [gpu], "clean": False, "expected": 1, "notes": [POISON], "holders": [holder], "why": POISON}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    op = request["op"]
    if op == "hello":
        return {"hello": hello()}
    if op == "look":
        return look(request)
    if op == "gpus":
        return gpus()
    if op == "probe":
        return {
            **hello(), "os": POISON, "kernel": POISON, "machine": POISON, "pythons": [], "gpus": [POISON], "nvidia_smi": True,
            "disks": [], "shm_bytes": 1, "cpu_count": 1, "mem_bytes": 1 << 30, "slurm": True, "tools": {}, "warnings": [POISON],
            "logind": {"kill_user_processes": True, "linger": False}, "limits": {"nofile": [5, 5]},
        }  # fmt: skip
    if op == "why":
        return {
            "why": {
                "job": POISON, "state": POISON, "step": POISON, "attempt": 1, "verdict": attempt()["verdict"], "exit_status": 1,
                "evidence": [POISON, {"line": POISON, "text": POISON}], "changed_next": {POISON: POISON}, "incident": POISON,
                "lost": None, "offer": POISON, "reason": POISON, "bundle": None, "stacks": None, "decision": None,
                "attempts": [{"step": POISON, "n": 1, "state": POISON, "exit_status": 1, "class": POISON, "changes": POISON}] * 2,
            }
        }  # fmt: skip
    if op == "history":
        return {"runs": [{"job": NAME, "attempts": []}]}
    if op == "list":
        return {"entries": json.loads(os.environ.get("ORCH_EVIL_ENTRIES", "[]")), "truncated": True}
    if op == "preflight":
        return {"ok": False, "checks": [{"step": POISON, "name": POISON, "verdict": "fail", "took_s": 2.0, "found": POISON, "fix": POISON}]}
    return {"ok": False, "error": {"code": "bad_request", "message": POISON, "hint": POISON}}


def endless(text: bytes) -> None:
    """Never a newline; until the reader has had enough."""
    while True:
        sys.stdout.buffer.write(text * 65536)


def first_words(mode: str) -> None:
    """What comes before, or instead of, a hello."""
    out = sys.stdout.buffer
    if mode == "no-newline":
        endless(b"x")
    if mode == "lines":
        endless(b"welcome\n")
    if mode == "need-again":
        threading.Thread(target=sys.stdin.buffer.read, daemon=True).start()
        while True:
            out.write(b'{"need":"release","hash":"x"}\n')
            out.flush()
    if mode == "stderr":
        sys.stderr.write(POISON * 100)
        sys.exit(255)
    if mode == "bootstrap-error":
        print(json.dumps({"error": POISON, "seen": POISON}), flush=True)
        sys.exit(3)
    print(json.dumps({"id": 0, "ok": True, "hello": hello()}), flush=True)


def write(head: bytes, pieces: Iterable[bytes]) -> None:
    """Much, without holding it here: the test counts the memory of both ends."""
    sys.stdout.buffer.write(head)
    for piece in pieces:
        sys.stdout.buffer.write(piece)


def later(mode: str, number: int) -> bytes | None:
    """The bytes that answer a look, for hosts that want to break more than a screen."""
    head = b'{"id":%d,"ok":true,' % number
    if mode == "after-no-newline":
        endless(head)
    if mode == "nested":
        return head + b'"jobs":' + b"[" * 5_000_000 + b"\n"
    if mode == "nested-object":
        return head + b'"jobs":' + b'{"a":' * 5_000_000 + b"\n"
    if mode == "values":
        write(head + b'"jobs":[', [b"[]," * 20_000] * 1000)
        return b"1]}\n"
    if mode == "keys":
        write(head + b'"jobs":{', (b"".join(b'"%07d":0,' % n for n in range(k, k + 5000)) for k in range(0, 5_000_000, 5000)))
        return b'"x":0}}\n'
    if mode == "huge-int":
        return head + b'"wall":' + b"9" * 1_000_000 + b"}\n"
    if mode == "payload":
        return head + b'"payload_bytes":99999999999999}\n'
    if mode == "negative":
        return head + b'"payload_bytes":-5}\n'
    if mode == "numbers":
        return head + b'"wall":1e999,"jobs":{"a-20261129-abcdef":{"state":{"seq":NaN}}}}\n'
    if mode == "types":
        return head + b'"wall":"x","jobs":{"a-20261129-abcdef":7,"b-20261129-abcdef":{"state":{"steps":3}}}}\n'
    if mode == "list":
        return head + b'"jobs":[1,2,3]}\n'
    return None


def main() -> None:
    if "-G" in sys.argv:
        os.execv(os.environ["ORCH_REAL_SSH"], ["ssh", *sys.argv[1:]])
    mode = os.environ.get("ORCH_EVIL", "")
    first_words(mode)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        sys.stdin.buffer.read(request.get("payload_bytes") or 0)
        raw = later(mode, request["id"]) if request["op"] == "look" else None
        payload = b""
        if raw is None:
            message = {"id": request["id"], "ok": True, **answer(request)}
            if request["op"] == "get":
                message, payload = get(request, message)
            raw = json.dumps(message).encode() + b"\n"
        sys.stdout.buffer.write(raw + payload)
        sys.stdout.buffer.flush()


def get(request: dict[str, Any], message: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """File bytes: as many as asked for, or ten times as many."""
    data = b"E" * (request["length"] * (10 if os.environ.get("ORCH_EVIL") == "fat-get" else 1))
    size = int(os.environ.get("ORCH_EVIL_SIZE", "8"))
    head = {"id": message["id"], "ok": True, "size": size, "eof": True, "changed": False, "mtime_ns": 1}
    return {**head, **({"payload_bytes": len(data)} if data else {})}, data


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)
