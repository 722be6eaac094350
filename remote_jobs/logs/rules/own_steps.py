"""Rules about our own job steps, whose last line is `<ErrorName>: what is wrong` (remote_jobs/steps/extraction/errors.py)."""

from __future__ import annotations

from remote_jobs.logs.rules.rule import ALWAYS, Rule

_OWN = "remote_jobs/steps"

RULES = (
    Rule("step-dataset", "data_corrupt", r"^DatasetError: ",
         "a row of the dataset cannot be used", "DatasetError: prompts.jsonl line 17: input_ids[3] = 200000 is out of range: the model's vocab_size is 163840", _OWN,
         advice="Mend or remove the named row, or make the dataset again with the model's own tokenizer.", shows_end=ALWAYS),
    Rule("step-config", "config", r"^ConfigError: ",
         "the step was told something that cannot work", "ConfigError: --layers 2,70: layer id 70 is outside 0..61", _OWN, shows_end=ALWAYS),
    Rule("step-checkpoint", "data_corrupt", r"^CheckpointError: ",
         "a file of the model is damaged or missing", "CheckpointError: model-00007-of-00064.safetensors: incomplete metadata, file not fully covered", _OWN,
         advice="Fetch the named file again, then retry.", shows_end=ALWAYS),
    Rule("step-numerical", "numerical", r"^NumericalError: ",
         "the model computed NaN or infinity", "NumericalError: non-finite values in the hidden states of sample 17, line 18: 12 NaN, 0 infinite", _OWN,
         advice="Check the named sample and the checkpoint; float16 overflows where bfloat16 does not.", shows_end=ALWAYS),
    Rule("step-verification", "numerical", r"^VerificationError: ",
         "recomputed hidden states differ from the stored ones", "VerificationError: sample 3, line 4: layer id 30 differs from a fresh forward pass by 0.41 (relative, limit 0.05)", _OWN,
         advice="Do not train on these states: check layer ids, versions and patch sets, then extract again with overwrite.", shows_end=ALWAYS),
    Rule("step-not-allowed", "auth", r"^IncompleteError: .*\bHTTP (?:401|403)\b",
         "the server wants to know who asks", "IncompleteError: 5 of 5 prompts have no answer: a, b, ... (Refused: HTTP 401: Unauthorized)", _OWN,
         advice="Give the step the server's API key in env:.", shows_end=ALWAYS),
    Rule("step-refused", "config", r"^IncompleteError: .*(?:\(Refused: |\bHTTP (?:400|404|405|413|414|415|422|501)\b)",
         "the server refuses what it is asked: the same request is refused again",
         'IncompleteError: 100 of 100 prompts have no answer: a, b, ... (Refused: HTTP 400: {"error":{"message":"max_tokens must be at least 1, got 0."}})', _OWN,
         advice="Change what the message names (max_tokens, sampling_params, model, the prompts' length), then retry: the answers so far are kept.", shows_end=ALWAYS),
    Rule("step-no-answer", "network", r"^IncompleteError: .*(?:\(Unreachable: |\bHTTP (?:408|409|425|429|5\d\d)\b)",
         "the server did not answer, or was too busy", "IncompleteError: 7 of 100 prompts have no answer: a, b, ... (Unreachable: HTTP 503: overloaded)", _OWN, shows_end=ALWAYS),
)  # fmt: skip
"""Errors that a step found itself: certain, and nothing that the same command could survive."""
