"""Parameters of the built-in steps: slips are caught, flags pass, and the lists agree with the scripts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from orchestrator.core.flags import TRAIN_FLAGS, VLLM_FLAGS
from orchestrator.core.inputs import _as_flags
from orchestrator.core.steps import BUILTIN, INHERITS_MODEL, SYNONYMS, unknown_parameter

STEPS = Path(__file__).parents[2] / "remote_jobs" / "steps"
SCRIPTS = {
    "serve": ["serve.py"],
    "generate": ["generate.py"],
    "vocab_map": ["vocab_map.py"],
    "extract": ["extract.py", "extraction/options.py"],
    "train": ["train.py"],
    "evaluate": ["evaluate.py"],
}


def flags_of(*names: str) -> set[str]:
    """Long options that the scripts declare with add_argument, in snake case."""
    found = set()
    for name in names:
        path = STEPS / name
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if path.exists() else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                if any(
                    keyword.arg == "help" and "SUPPRESS" in ast.dump(keyword.value)
                    for keyword in node.keywords
                ):
                    continue  # for the script's own use
                found |= {
                    arg.value[2:].replace("-", "_")
                    for arg in node.args
                    if isinstance(arg, ast.Constant)
                    and isinstance(arg.value, str)
                    and arg.value.startswith("--")
                }
    return found


@pytest.mark.parametrize("uses", BUILTIN)
def test_every_flag_of_a_script_is_a_parameter(uses: str) -> None:
    set_by_split = {"range", "merge", "join"}
    missing = flags_of(*SCRIPTS[uses]) - set(BUILTIN[uses].names()) - BUILTIN[uses].flags - set_by_split
    assert not missing, f"add to orchestrator/core/steps.py: {sorted(missing)}"


@pytest.mark.parametrize("uses", [name for name, step in BUILTIN.items() if not step.flags])
def test_closed_steps_promise_nothing_that_their_script_lacks(uses: str) -> None:
    assert set(BUILTIN[uses].names()) <= flags_of(*SCRIPTS[uses])


@pytest.mark.parametrize("uses", [name for name, step in BUILTIN.items() if step.flags])
def test_no_known_flag_is_called_a_slip(uses: str) -> None:
    for flag in BUILTIN[uses].flags:
        assert unknown_parameter(uses, flag) is None, flag


@pytest.mark.parametrize(
    "flag", ["brand_new_backend", "enable_foo_bar", "v2_model_runner", "moe_dispatch", "draft_tensor_map"]
)
def test_flags_of_tomorrow_pass(flag: str) -> None:
    assert unknown_parameter("serve", flag) is None
    assert unknown_parameter("extract", flag) is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tensor_parallel", "tensor_parallel_size"),
        ("tensorparallel_size", "tensor_parallel_size"),
        ("tensor-parallel-size", "tensor_parallel_size"),
        ("Tensor_Parallel_Size", "tensor_parallel_size"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("gpu_mem_utilization", "gpu_memory_utilization"),
        ("max_model_length", "max_model_len"),
        ("max_num_seq", "max_num_seqs"),
        ("enforce_eagr", "enforce_eager"),
        ("trust_remotecode", "trust_remote_code"),
        ("modle", "model"),
        ("dtyp", "dtype"),
        ("kv_cache_dtyp", "kv_cache_dtype"),
        ("quantisation", "quantization"),
        ("tp", "tensor_parallel_size"),
        ("max_seq_len", "max_model_len"),
    ],
)
def test_slips_name_what_was_meant(key: str, meant: str) -> None:
    found = unknown_parameter("serve", key)
    assert found is not None
    assert repr(meant) in found[1]


def test_tables_agree() -> None:
    own = {name for step in BUILTIN.values() for name in step.names()}
    assert set(SYNONYMS.values()) <= own
    assert not set(SYNONYMS) & (own | VLLM_FLAGS | TRAIN_FLAGS)
    assert set(BUILTIN) >= INHERITS_MODEL
    for step in BUILTIN.values():
        assert {*step.required, *step.takes} <= set(step.names())
        assert {uses for uses, _ in step.takes.values()} <= set(BUILTIN)


def test_extra_args_become_parameters() -> None:
    words = ["--a-b", "1", "--c", "--d=x=y", "--e", "2", "3"]
    assert _as_flags(words) == {"a_b": "1", "c": True, "d": "x=y", "e": "2 3"}
