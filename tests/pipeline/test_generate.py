"""generate against a chat server that misbehaves: exact counts, resume by id, thinking apart, errors said and kept."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from remote_jobs.logs import explain_bytes
from tests.pipeline.chat_server import ChatServer, answer
from tests.pipeline.conftest import Host, write_prompts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180, func_only=True)  # fixtures may have to build the host environment


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gen" / "responses.jsonl").read_text().splitlines()]


def arguments(folder: Path, server: ChatServer, *more: object) -> list[object]:
    return [
        "--dataset",
        folder / "prompts.jsonl",
        "--output",
        folder / "gen",
        "--endpoint",
        server.url,
        *more,
    ]


def test_tokens_mask_and_thinking(host: Host) -> None:
    """Thinking and answer are both learned; the mask falls on what was generated; the texts are kept apart."""
    write_prompts(host.folder / "prompts.jsonl", 3)
    parsed = {"message": {"reasoning": "hm", "content": "four"}}
    raw = {"message": {"content": "<think>\nhm\n</think>\n\nfour"}}
    cut = {"message": {"content": "<think>\nhm and"}, "choice": {"finish_reason": "length"}}
    kinds = [parsed, raw, cut]
    with ChatServer(lambda body, n: answer(body, **{k: dict(v) for k, v in kinds[n - 1].items()})) as server:
        ran = host.run("generate", *arguments(host.folder, server, "--concurrency", 1, "--seed", 3))
    found = rows(host.folder)
    assert [(row["reasoning"], row["response"]) for row in found] == [
        ("hm", "four"),
        ("hm", "four"),
        ("hm and", ""),
    ]
    for row in found:
        learned = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        assert learned == [7, 8, 9, 10, 2]
        assert set(row["input_ids"][: row["loss_mask"].index(1)]) == {1}
    assert all(body["return_token_ids"] for body in server.bodies)
    assert len({body["seed"] for body in server.bodies}) == 3
    assert "0 errors, 1 truncated" in ran.log
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user"]
    assert ran.marks("done", "done") == [{"phase": "done", "state": "done", "done": 3, "total": 3}]


def test_conversations_are_answered_turn_by_turn(host: Host) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "b"},
    ]
    (host.folder / "prompts.jsonl").write_text(json.dumps({"id": "c", "messages": turns}) + "\n")
    with ChatServer(lambda body, _: answer(body, message={"reasoning": "secret"})) as server:
        host.run("generate", *arguments(host.folder, server))
    assert [row["id"] for row in rows(host.folder)] == ["c#0", "c#1"]
    history = server.bodies[1]["messages"]
    assert [message["content"] for message in history] == ["a", "an answer", "b"], (
        "thinking must not be in the history"
    )


def test_faults_that_pass_are_retried(host: Host) -> None:
    write_prompts(host.folder / "prompts.jsonl", 6)

    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]] | None:
        if number <= 3:
            return 503, {"error": "busy"}
        return None if number == 5 else answer(body)

    with ChatServer(reply) as server:
        ran = host.run("generate", *arguments(host.folder, server, "--concurrency", 2))
    assert len(rows(host.folder)) == 6
    assert "(0 errors" in ran.log
    assert not (host.folder / "gen" / "errors.jsonl").exists()


def test_a_prompt_that_is_refused_fails_the_step_and_loses_nothing(host: Host) -> None:
    """speculators exits with 0 here. We name the prompts, keep the rest, and ask only for the missing ones later."""
    write_prompts(host.folder / "prompts.jsonl", 9)

    def reply(body: dict[str, Any], _number: int) -> tuple[int, dict[str, Any]]:
        if "about 4 " in body["messages"][-1]["content"]:
            return 400, {"error": "maximum context length"}
        return answer(body)

    with ChatServer(reply) as server:
        ran = host.run("generate", *arguments(host.folder, server), expect=1)
        assert ran.last.startswith("IncompleteError: 1 of 9 prompts have no answer: p4")
        assert "errors.jsonl" in ran.log
    assert (explain_bytes(ran.log.encode(), 1)["failure"] or {})["class"] == "config", (
        "asking the same again is of no use"
    )
    [error] = map(json.loads, (host.folder / "gen" / "errors.jsonl").read_text().splitlines())
    assert error["prompt_id"] == "p4"
    assert "maximum context length" in error["error"]
    with ChatServer(lambda body, _: answer(body)) as server:
        host.run("generate", *arguments(host.folder, server))
        assert len(server.bodies) == 1
    assert sorted(row["id"] for row in rows(host.folder)) == [f"p{i}" for i in range(9)]


def test_resume_counts_exactly_after_a_kill_and_a_cut_line(host: Host) -> None:
    """speculators' --resume --limit counts new rows (16 done and 24 asked gave 40); here samples is the total."""
    write_prompts(host.folder / "prompts.jsonl", 40)
    enough = threading.Event()

    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        if number > 10:
            enough.wait(60)
        return answer(body)

    with ChatServer(reply) as server:
        process, _ = host.start(
            "generate", *arguments(host.folder, server, "--samples", 24, "--concurrency", 4)
        )
        path = host.folder / "gen" / "responses.jsonl"
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 7, "seven rows are there")
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        enough.set()
    with path.open("ab") as stream:
        stream.write(b'{"id": "p39", "prompt_id": "p39", "input_i')
    with ChatServer(lambda body, _: answer(body)) as server:
        host.run("generate", *arguments(host.folder, server, "--samples", 24))
        assert len(server.bodies) <= 24 - 7
    assert sorted(int(row["id"][1:]) for row in rows(host.folder)) == list(range(24))


def test_sigterm_keeps_what_is_there(host: Host) -> None:
    write_prompts(host.folder / "prompts.jsonl", 30)
    hold = threading.Event()

    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        if number > 8:
            hold.wait(60)
        return answer(body)

    with ChatServer(reply) as server:
        process, log = host.start("generate", *arguments(host.folder, server, "--concurrency", 4))
        path = host.folder / "gen" / "responses.jsonl"
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 8, "eight rows are there")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        hold.set()
    assert "the next run goes on from there" in log.read_text()
    assert len(rows(host.folder)) == 8


def test_a_server_that_dies_half_way_is_said_and_nothing_is_lost(host: Host) -> None:
    write_prompts(host.folder / "prompts.jsonl", 60)
    with ChatServer(lambda body, n: answer(body) if n <= 20 else None) as server:
        ran = host.run(
            "generate", *arguments(host.folder, server, "--max-retries", 0, "--concurrency", 4), expect=1
        )
    # Twenty in a row, and what was under way beside the last of them.
    assert re.match(r"StepError: Connection refused: the server has not answered 2[0-3] requests in a row", ran.last)
    assert len(rows(host.folder)) == 20


def test_a_server_without_token_ids_is_refused(host: Host) -> None:
    write_prompts(host.folder / "prompts.jsonl", 2)
    with ChatServer(lambda body, _: answer(body, prompt_token_ids=None)) as server:
        host.run("generate", *arguments(host.folder, server), expect=1)
    assert "return_token_ids" in (host.folder / "gen" / "errors.jsonl").read_text()


def test_answers_of_two_settings_are_not_mixed(host: Host) -> None:
    write_prompts(host.folder / "prompts.jsonl", 2)
    with ChatServer(lambda body, _: answer(body)) as server:
        host.run("generate", *arguments(host.folder, server))
        ran = host.run("generate", *arguments(host.folder, server, "--temperature", 1), expect=2)
    assert "temperature was 0.0, now 1.0" in ran.last


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no rows"),
        ('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt"\n', "line 2: not valid JSON"),
        ('{"id": "a", "answer": "x"}\n', "line 1: no user message (keys: id, answer)"),
        (
            '{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n',
            "line 2: id 'a' was already used on line 1",
        ),
        ('{"id": "a", "messages": [{"role": "robot", "content": "x"}]}\n', "has the role 'robot'"),
        ('{"id": "a", "prompt": "x"}\n', "has 1 rows, 5 were asked for"),
    ],
)
def test_bad_prompts_are_found_before_the_first_request(host: Host, content: str, said: str) -> None:
    (host.folder / "prompts.jsonl").write_text(content)
    with ChatServer(lambda body, _: answer(body)) as server:
        ran = host.run("generate", *arguments(host.folder, server, "--samples", 5), expect=1)
        assert said in ran.last
        assert server.bodies == []
