"""What is no failure: noise lines, contexts in which a traceback was caught, signs of finished or going-on work.

Every pattern here takes a verdict away, so each names text that programs print while they are fine.
"""

from __future__ import annotations

import re

NOISE = re.compile(
    r"leaked (?:semaphore|shared_memory|function|type|instance)|nanobind: |resource_tracker"
    r"|destroy_process_group\(\) was not called|(?:Future|User|Deprecation|Runtime|Resource|Syntax|PendingDeprecation|Future)Warning"
    r"|is over \d+% full|Attempting to register factory|computation_placer already registered|TF-TRT Warning|Could not find TensorRT"
    r"|pip's dependency resolver does not currently|Setting OMP_NUM_THREADS|errno: 97 - Address family not supported"
    r"|Ignoring this choice|Reducing block sizes or `num_stages`|out of resource: .*(?:autotun|Ignor)"
    r"|Gradient overflow|OVERFLOW!|reducing (?:loss scale )?to|Skipping step, loss scal|grad(?:ient)? scaler"
    r"|Found ulimit of|cause fd limit errors|If you (?:see|encounter|get|are seeing|run into)|in case of (?:an )?(?:error|OOM|out)|to avoid (?:CUDA )?(?:OOM|out of memory|errors?|this)"
    r"|This (?:can|may|might|could) (?:cause|lead|result)|(?:may|might|can|could|will) (?:lead to|result in|cause) .{0,60}(?:error|OOM|out of memory|fail|crash|hang)"
    r"|error_records|errors?['\"]?[=:] ?0\b|\b0 (?:errors?|failed|failures)\b|err=0|num_errors|no errors?\b|without errors?"
    r"|NCCL INFO|NET/(?:OFI|Plugin|Socket).*(?:[Nn]o plugin|[Ff]alling back|[Nn]ot found)|NET/Plugin"
    r"|TORCH_NCCL_\w+|NCCL_ASYNC_ERROR_HANDLING|abort_on_|ignore_?errors|on_error|raise_on_error|error_if_|errors=",
)
"""A line with such text proves nothing. Judged on the line without its prefix."""

HARMLESS = re.compile(
    r"Device or resource busy: .*\.nfs[0-9a-f]{6}|'NoneType' object has no attribute '(?:terminate|join|close|cadam|dumps?|maxsize|path|is_alive|cuda_runtime)"
    r"|sys\.meta_path is None|Python is likely shutting down|cannot schedule new futures after (?:interpreter )?shutdown|can't (?:register atexit|create new thread at interpreter) "
)
"""Exceptions that only ever come from a program's way out, or that a library swallows (NFS silly-renames)."""

FINITE_RETRY = re.compile(
    r"(?i)(?:will |is |are |be )?(?:retry(?:ing)?|trying (?:again|to resume|to reconnect|another|with|next|a smaller)|re-?attempt(?:ing)?|falling back|fall(?:s)? back|fallback"
    r"|reconnecting|attempt \d+(?:/| of )\d+|backing off|backoff|will be (?:retried|regenerated|ignored|skipped)"
    r"|skipp(?:ing|ed)\b|ignor(?:ing|ed)\b|continu(?:e|ing) (?:with|without|anyway)|recover(?:ing|ed)|attempting to recover|proceeding without"
    r"|using (?:the )?(?:slow|default|native|eager|cpu|pytorch|torch|fallback)|disabl(?:ing|ed)\b|not critical|non-fatal|can be safely ignored|harmless|entering retry loop)"
)
"""The program says that it goes on: the failure named on this line was handled (unless it was the last try)."""

GAVE_UP = re.compile(r"(?i)giving up|after \d+ (?:retries|attempts|tries)|retries exceeded|exhausted|no more retries|max(?:imum)? retries (?:reached|exceeded)|too many retries|could not recover")
"""The last try: overrides FINITE_RETRY."""

CAUGHT = re.compile(
    r"Exception ignored (?:in|while|on)|Error in atexit|Exception in ASGI application|Task exception was never retrieved|Future exception was never retrieved"
    r"|--- Logging error ---|WON'T CONVERT|Exception in (?:callback|thread Thread.*_pin_memory|thread (?:wandb|Msg|Chk|Net|Int|IOServ))|exception calling callback"
    r"|Unclosed client session|Unclosed connector|Error in sys\.excepthook|while handling request|Error in preprocessing prompt|Error with model error=|Request \S+ failed"
    r"|handle_exception|caught exception|Caught exception|ignored exception|swallow",
)
"""A traceback right behind such a line was caught: the process went on."""

DONE = re.compile(
    r"'train_runtime'|\"train_runtime\"|[Tt]raining (?:is )?(?:completed?|finished|done)\b(?!.{0,10}epoch)|Training epoch (?P<n>\d+)/(?P=n) completed|[Ff]inished training\b"
    r"|[Dd]ata generation complete|Pipeline complete in|Done preparing data|[Dd]ataset preprocessing complete"
    r"|`Trainer\.fit` stopped: `max_(?:steps|epochs)|Final validation metrics|[Ee]valuation (?:completed?|finished|done)\b"
    r"|[Aa]ll (?:done|tasks (?:completed|finished)|jobs (?:completed|finished))|[Jj]ob (?:completed|succeeded|finished) ?(?:successfully)?$|Run completed|[Cc]ompleted successfully|[Ff]inished successfully|SUCCESS(?:FULLY)?\b"
    r"|successfully (?:completed|finished|trained)|[Gg]eneration (?:completed?|finished)|extracted \d+ x \d+|[Ss]aved (?:the )?final|[Ff]inal (?:model|checkpoint) saved|[Ee]xperiment (?:completed|finished)|Benchmark (?:completed|finished)|after training is done|\[after training\]|wandb: Run summary|View run .* at:|exiting program at iteration|Job '.*' succeeded"
)
"""The work was done; what follows is the way out."""

SERVER_STOPPED = re.compile(r"Application shutdown complete|Finished server process|Shutting down FastAPI|\[shutdown\] (?:API server|EngineCore|MPClient|Process manager)|all workers exited gracefully|Waiting for application shutdown|Server (?:stopped|shut down)")
"""A server going down in order, as told."""

ACTIVITY_NEEDLES = (b'" 200', b"'loss': ", b'"loss": ', b"throughput: ", b" lm loss", b"loss: ", b"train/loss", b"step:", b"HTTP/1.1 200")
"""Counted per block at C speed: healthy work goes on behind an error. Each counts WORK units."""
WORK = 8
"""Units of one piece of visible work (a bar's advance, an answered request); an INFO line counts one."""
