#!/bin/sh
# On a real GPU host: the whole preflight with --deep of a Qwen3-like and a DeepSeek-MLA-like checkpoint.
#
#   bench/gpu/deep_h200.sh [PYTHON] [OUT]     PYTHON has vLLM >= 0.20 and torch (PYTHONPATH is kept); OUT: a folder
#
# Only configs and tokenizers are needed (the weights of the deep run are dummies), so the checkpoints are made here with
# the sizes of the figures in the README and shards of zeros that are holes: no disk is used. Prints one JSON line per model.
set -eu
python=${1:-python3}
out=${2:-$(mktemp -d)}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
for kind in qwen3 deepseek; do
    "$python" "$here/bench/gpu/deep_request.py" "$kind" "$out" > "$out/$kind.request.json"
    start=$(date +%s.%N)
    "$python" -S -c "import sys; sys.path.insert(0, '$here'); from remote_jobs.agent.checks.__main__ import main; main()" \
        < "$out/$kind.request.json" > "$out/$kind.json" 2> "$out/$kind.err" || cat "$out/$kind.err" >&2
    end=$(date +%s.%N)
    "$python" - "$kind" "$out/$kind.json" "$start" "$end" <<'PY'
import json, sys
kind, path, start, end = sys.argv[1:]
answer = json.load(open(path))
rows = [r for r in answer["checks"] if r["verdict"] in ("warn", "fail") or r["name"] in ("deep", "gpus", "checkpoint", "versions", "memory")]
print(json.dumps({"model": kind, "ok": answer["ok"], "wall_s": round(float(end) - float(start), 1), "rows": rows}))
PY
done
