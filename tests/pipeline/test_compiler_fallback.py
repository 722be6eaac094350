"""When the compiler refuses a training before its first step, and when it did not: real Dynamo errors, no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from remote_jobs.steps import compiler_fallback as fallback


def error_of(function: object) -> BaseException:
    try:
        function()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_only_the_compilers_own_failures_count() -> None:
    def untraceable(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(5, 5)

    def out_of_memory(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    compiled = torch.compile(untraceable, backend="eager", fullgraph=True)
    refused = error_of(lambda: compiled(torch.ones(3)))
    assert fallback.is_compiler_failure(refused)

    def wrapped() -> None:
        try:
            compiled(torch.ones(3))
        except Exception as error:
            raise RuntimeError("training failed") from error

    assert fallback.is_compiler_failure(error_of(wrapped))
    assert not fallback.is_compiler_failure(error_of(lambda: wrong(torch.ones(3))))

    left_alone = torch.compiler.disable(wrong)
    around = torch.compile(lambda x: left_alone(x + 1), backend="eager")
    assert not fallback.is_compiler_failure(error_of(lambda: around(torch.ones(3))))
    assert not fallback.is_compiler_failure(error_of(lambda: out_of_memory(torch.ones(3))))


def test_ways_are_tried_in_turn_and_remembered(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert fallback.way(folder) == 0
    assert fallback.next_way(folder) is None, "a failure that is not the compiler's changes nothing"
    fallback.note_failure(folder, RuntimeError("0 active drivers\nmore"))
    fallback.forget_failure(folder)
    assert fallback.next_way(folder) is None, "an older run's failure is not this one's"
    for number in (1, 2):
        fallback.note_failure(folder, RuntimeError(f"failure {number}"))
        assert fallback.next_way(folder) == f"RuntimeError: failure {number}"
        assert fallback.way(folder) == number
    fallback.note_failure(folder, RuntimeError("and again"))
    assert fallback.next_way(folder) is None
    assert fallback.way(folder) == 2
    (tmp_path / fallback.NAME).write_text("{damaged")
    assert fallback.way(folder) == 0
    (tmp_path / fallback.NAME).write_text(json.dumps({"way": 17}))
    assert fallback.way(folder) == 0


def test_flags_are_replaced_in_both_spellings() -> None:
    command = ["-m", "x", "--loss-implementation", "fused", "--lr=1", "--draft-attn-impl=flex", "--flag"]
    new = fallback.changed(command, {"--loss-implementation": "eager", "--draft-attn-impl": "sdpa"})
    assert new == [
        "-m",
        "x",
        "--lr=1",
        "--flag",
        "--loss-implementation",
        "eager",
        "--draft-attn-impl",
        "sdpa",
    ]
    assert fallback.changed(command, {}) == command
