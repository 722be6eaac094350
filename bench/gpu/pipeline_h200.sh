#!/bin/sh
# On a real GPU host: extraction of a dense (14 GB) and an MLA + MoE (31 GB) checkpoint in 64 shards, verified against
# transformers, beside vLLM's plain prefill; then speculators trains on the dense one's states.
#
#   bench/gpu/pipeline_h200.sh [PYTHON] [OUT] [KINDS]     PYTHON has vLLM >= 0.20, speculators 0.9 and torch
#
# Prints one JSON line per figure. The checkpoints are made in OUT and removed at the end (45 GB).
set -eu
python=${1:-python3}
out=${2:-$(mktemp -d)}
kinds=${3:-qwen3 deepseek}
here=$(cd "$(dirname "$0")/../.." && pwd)
steps=$here/remote_jobs/steps
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 ORCH_ROOT=$out/root PYTHONUNBUFFERED=1 COLUMNS=400
mkdir -p "$out"
for kind in $kinds; do
    PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} "$python" -m bench.gpu.make_checkpoint "$kind" "$out/$kind"
    case $kind in qwen3) layers=2,18,33,36 ;; *) layers=1,2,13,27 ;; esac
    "$python" - "$out/$kind.jsonl" <<'PY'
import json, random, sys
random.seed(0)
with open(sys.argv[1], "w") as file:
    for index in range(64):
        ids = [random.randrange(5, 31000) for _ in range(random.randrange(64, 1024))]
        file.write(json.dumps({"id": str(index), "input_ids": ids, "loss_mask": [0] * 32 + [1] * (len(ids) - 32)}) + "\n")
PY
    start=$(date +%s)
    "$python" "$steps/extract.py" --model "$out/$kind" --dataset "$out/$kind.jsonl" --layers $layers --backend vllm \
        --output "$out/$kind.states" --verify 8 --gpu-memory-utilization 0.6 > "$out/$kind.extract.log" 2>&1 \
        || tail -n 30 "$out/$kind.extract.log"
    "$python" -c "
import json, sys
m = json.load(open('$out/$kind.states/manifest.json'))
print(json.dumps({'extract': '$kind', 'seconds': $(date +%s) - $start, **{k: m[k] for k in ('samples', 'tokens', 'layer_ids', 'verified', 'versions')}}))"
    "$python" "$here/bench/gpu/pipeline_rates.py" "$out/$kind" --out "$out/$kind.rates" --gpu-memory-utilization 0.6 \
        2> "$out/$kind.rates.log" || tail -n 30 "$out/$kind.rates.log"
    rm -rf "$out/$kind.rates"
    if [ "$kind" = qwen3 ]; then
        "$python" "$steps/vocab_map.py" --model "$out/$kind" --dataset "$out/$kind.jsonl" --draft-vocab-size 16000 \
            --min-coverage 0.1 --output "$out/map" > "$out/map.log" 2>&1
        "$python" "$steps/train.py" --model "$out/$kind" --hidden-states "$out/$kind.states" --vocab-map "$out/map" \
            --output "$out/train" --epochs 2 --total-seq-len 2048 > "$out/train.log" 2>&1 || tail -n 30 "$out/train.log"
        "$python" -c "
import json
rows = [json.loads(line) for line in open('$out/train/metrics.jsonl')]
steps = [row for row in rows if 'train' in row]
speed = sorted(row['profile']['tokens_per_s'] for row in steps)[len(steps) // 2]
print(json.dumps({'train': '$kind', 'steps': len(steps), 'loss': [steps[0]['train']['loss'], steps[-1]['train']['loss']], 'median_tokens_per_s': speed}))"
    fi
    rm -rf "$out/$kind" "$out/$kind.states"
done
