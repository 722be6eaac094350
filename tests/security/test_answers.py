"""A host whose answers are malformed anywhere: one clear screen that names the host and what was wrong, never a bug.

The whole program runs, from the command line to the wire; only the bytes that a host sends are made here. Every place of
every answer is replaced by rubbish: another type, nothing, numbers that cannot be meant, nests without end.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import queue
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.main import main
from orchestrator.core.answers import ANSWERS, check_answer
from orchestrator.core.errors import ProtocolError
from orchestrator.hosts import pool, session
from orchestrator.hosts.stream import Framing
from tests.security import evil_host
from tests.security.evil_host import NAME

CASES = 40
"""Of each command: some of its places with some of the rubbish, the same in every run."""


def nest(depth: int) -> Any:
    return [] if depth == 0 else {"a": [nest(depth - 2)]} if depth > 1 else [[]]


ABSENT = object()
RUBBISH: tuple[Any, ...] = (
    ABSENT, None, True, 0, -1, 1 << 70, -(10**300), 1e308, float("nan"), float("-inf"), "", "x", "\ud800", "9" * 400,
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z", "2026-11-29T20:00:00", [], [None], [[1]], ["x"], [{}], {}, {"": None},
    {"a": {"b": [1]}}, nest(80), nest(400),
)  # fmt: skip


class Wire:
    """The host's end in memory: speaks the agent's protocol and says what it is told to say."""

    def __init__(self, say: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._say = say
        self._out: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._in = bytearray()
        self._write({"id": 0, "ok": True, **say({"op": "hello"})})

    def _write(self, message: dict[str, Any], payload: bytes = b"") -> None:
        self._out.put(json.dumps(message).encode() + b"\n" + payload)

    def send(self, data: bytes) -> None:
        self._in += data
        while (end := self._in.find(b"\n")) >= 0:
            framing = Framing(lambda _size, left=[bytes(self._in), b""]: left.pop(0))
            try:
                request = framing.message()
            except EOFError:
                return
            assert isinstance(request, dict)
            del self._in[: end + 1 + request.get("payload_bytes", 0)]
            answer = {"id": request["id"], "ok": True, **self._say(request)}
            payload = answer.pop("payload", b"")
            self._write({**answer, **({"payload_bytes": len(payload)} if payload else {})}, payload)

    def recv(self, _size: int) -> bytes:
        return self._out.get()

    def recv_stderr(self, _size: int) -> bytes:
        return b""

    def close(self) -> None:
        self._out.put(b"")

    def tunnel(self, _address: str, _port: int) -> Any:
        raise OSError("no forwarding here")

    def explain_end(self, _stderr: str) -> None:
        return None


def honest(request: dict[str, Any]) -> dict[str, Any]:
    """What a whole host would say: every field that anything reads is there."""
    op = request["op"]
    if op == "look":
        log = {
            "job": NAME, "step": "s", "attempt": 1, "inode": 5, "offset": 0, "end": 3, "size": 3, "caught_up": True,
            "data_b64": base64.b64encode(b"abc").decode(), "skipped_bytes": 0, "rotated": False, "missing": False,
        }  # fmt: skip
        record = evil_host.job("failed", "failed", lost={"reason": "x", "processes": [{"pid": 3}]})
        record["state"] |= {"eta": {"at": "2026-11-29T20:00:00Z", "low_s": 1, "high_s": 2}, "ended_at": "2026-11-29T20:02:00Z"}
        record["spec"]["secrets"] = {"s": ["TOKEN"]}
        step = record["state"]["steps"][0]
        step |= {"name": "s", "service": False}
        step["attempts"][0] |= {"kept": 3}
        step["attempts"][0]["phases"][0] |= {"took_s": 3.0, "ended_at": "2026-11-29T20:00:03Z"}
        return {"wall": 1.0, "jobs": {NAME: record}, "unreadable": {"y": "x"}, "logs": [log], "gpus": {**evil_host.gpus(), "age_s": 1.0}}
    if op == "history":
        forecast = {"mark": 25, "true_s": 3.0, "forecast_s": 2.0, "printed_s": 4.0}
        return {"runs": [{"job": NAME, "took_s": 3.0, "phases": {"load": 2.0}, "forecasts": [forecast]}]}
    if op == "get":
        if request["path"].endswith("usage.jsonl"):
            readings = [{"at": f"2026-11-29T20:0{n}:00Z", "gpus": [[0, 50, 10, 100]]} for n in range(3)]
            return file(b"".join(json.dumps(row).encode() + b"\n" for row in readings))
        return file(json.dumps({"workdir": "/w", "steps": [{"name": "s", "service": {"ready": {"port": 80}}}]}).encode())
    if op == "list":
        return {"entries": [{"root": "o", "path": "a", "absolute": "/o/a", "size": 3, "mtime_ns": 5, "kind": "file"}], "truncated": False}
    if op == "digest":
        return {"sha256": "0" * 64, "size": 3}
    if op == "control":
        return {"acknowledged": True, "seq": 5, "state": evil_host.job("stopped", "stopped")["state"]}
    if op == "launch":
        return {"job": NAME, "adopted": False, "state": evil_host.job("queued", "queued")["state"], "warnings": ["x"]}
    if op == "have":
        return {"missing": [{"sha256": sha256, "offset": 0} for sha256 in request["sha256"]]}
    if op == "put":
        return {"offset": 3, "stored": True}
    if op == "preflight":
        return {"checks": [{"step": "s", "name": "n", "verdict": "warn", "took_s": 2.0, "found": "f", "fix": "x"}]}
    if op == "gc":
        row = {"kind": "job", "name": "n", "bytes": 3, "age_s": 4.0, "why": "w"}
        return {"items": [row], "kept": [row], "bytes": 3}
    if op == "patch":
        sets = [{
            "name": "n", "summary": "s", "package": "p", "version": "1", "state": "drift", "why": "w",
            "changes": [{"what": "x", "why": "y", "upstream": "u"}],
        }]  # fmt: skip
        return {"sets": sets, "python": "/p", "versions": {"vllm": "1"}, "overlay": "/o", "restored": {"n": ["f"]}}
    return {key: value for key, value in evil_host.answer(request).items() if key != "ok"}


def file(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "mtime_ns": 1, "eof": True, "changed": False, "payload": data}


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document; of lists the first item stands for all."""
    if here:
        yield here
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, found in inner:
        if key != "payload":
            yield from places(found, (*here, key))


def replaced(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The document with something else in one place."""
    changed = copy.deepcopy(document)
    at: Any = changed
    for key in place[:-1]:
        at = at[key]
    if value is ABSENT:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return changed


class Laptop:
    """Runs commands in this process, against a host that says what `say` says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.say: Callable[[dict[str, Any]], dict[str, Any]] = honest
        (folder / "inventory.yaml").write_text('{"hosts": {"box": {"ssh": "me@192.0.2.7", "gpus": 1, "root": "/r"}}}')
        (folder / "file.txt").write_text("abc")
        step = {"name": "s", "run": "true", "files": ["file.txt"]}
        (folder / "plan.yaml").write_text(json.dumps({"name": "p", "host": "box", "steps": [step]}))
        monkeypatch.chdir(folder)
        monkeypatch.setenv("ORCH_HOME", str(folder / "home"))
        monkeypatch.setenv("ORCH_INVENTORY", str(folder / "inventory.yaml"))
        monkeypatch.delenv("ORCH_DEBUG", raising=False)
        monkeypatch.setattr(session, "HELLO_WITHIN_S", 1.0)
        monkeypatch.setattr(pool, "open_stream", lambda *_: Wire(self.say))
        assert self.run("status")[0] == 0

    def run(self, *words: str) -> tuple[int, str, str]:
        status = main(words)
        said = self.capsys.readouterr()
        return status, said.out, said.err


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Laptop:
    return Laptop(tmp_path, monkeypatch, capsys)


COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "status": (["status", "--processes"], {"look"}),
    "watch": (["watch", NAME, "--plain"], {"look"}),
    "wait": (["wait", NAME], {"look"}),
    "logs": (["logs", NAME], {"look"}),
    "why": (["why", NAME], {"why"}),
    "why --json": (["why", NAME, "--json"], {"why"}),
    "gpus": (["gpus", "box"], {"gpus"}),
    "hosts check": (["hosts", "check", "box"], {"hello", "probe"}),
    "doctor": (["doctor"], {"hello", "probe"}),
    "preflight": (["preflight", "plan.yaml"], {"hello", "preflight"}),
    "launch": (["launch", "plan.yaml", "--new"], {"have", "put", "launch", "preflight"}),
    "history": (["history"], {"look", "history"}),
    "history JOB": (["history", NAME], {"look", "get"}),
    "report": (["report", NAME, "-o", "page.html"], {"look", "why", "history", "get"}),
    "forward": (["forward", NAME], {"look", "get"}),
    "fetch": (["fetch", NAME, "dest"], {"list", "digest", "get"}),
    "stop": (["stop", NAME], {"control"}),
    "retry": (["retry", NAME], {"control"}),
    "gc": (["gc", "box"], {"gc"}),
    "patch list": (["patch", "list", "box"], {"patch"}),
    "patch check": (["patch", "check", "box"], {"patch"}),
    "patch apply": (["patch", "apply", "box"], {"patch"}),
    "patch revert": (["patch", "revert", "box"], {"patch"}),
}
EXITS = {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", COMMANDS)
def test_rubbish_anywhere_is_the_hosts_trouble(laptop: Laptop, name: str) -> None:
    words, ops = COMMANDS[name]
    dice = random.Random(name)
    asked = {"job": NAME, "sha256": ["0" * 64], "path": "x"}
    where = [(op, place) for op in sorted(ops) for place in places(honest({**asked, "op": op}))]
    for op, place in dice.sample(where, min(CASES, len(where))):
        rubbish = dice.choice(RUBBISH)

        def say(request: dict[str, Any], op: str = op, place: Any = place, rubbish: Any = rubbish) -> dict[str, Any]:
            answer = honest(request)
            with contextlib.suppress(KeyError, IndexError):  # an answer to another question
                return replaced(answer, place, rubbish) if request["op"] == op else answer
            return answer

        laptop.say = say
        status, out, err = laptop.run(*words)
        what = f"{op} {place} = {str(rubbish)[:60]}: {status}\n{out[-600:]}\n{err[-600:]}"
        assert status in EXITS, what
        assert "Traceback" not in err, what
        assert len(err.splitlines()) <= 24, what
        if status == 3:
            assert "box" in out + err, what


@pytest.mark.parametrize("op", ANSWERS)
def test_what_is_wrong_is_said_with_its_place(op: str) -> None:
    """Each request's answer by the very table: a key that must be there, and one of another type."""
    for key in ANSWERS[op]:
        name = key.rstrip("!~")
        for rubbish in (nest(1), 1 << 70, "x", True):
            said = ""
            try:
                check_answer("box", op, {name: rubbish})
            except ProtocolError as error:
                said = error.message
            assert said == "" or re.match(rf"box: its answer to {op} makes no sense: the answer(\.| has no )\w+", said)
        if key.endswith("!"):
            with pytest.raises(ProtocolError, match=f"box: its answer to {op} makes no sense: the answer"):
                check_answer("box", op, {})


def test_json_says_the_same_to_programs(laptop: Laptop) -> None:
    laptop.say = lambda request: {"why": {"attempts": [7]}} if request["op"] == "why" else honest(request)
    status, out, err = laptop.run("why", NAME, "--json")
    error = json.loads(out)["error"]
    assert (status, error["code"]) == (3, "protocol")
    assert error["message"] == "box: its answer to why makes no sense: the answer.why.attempts is a number, not an object"
    assert error["hint"] in err
