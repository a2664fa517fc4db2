#!/usr/bin/env bash
# A language model learns to reason by reinforcement learning, on this machine, from nothing.
#   bash launch/quickstart.sh [SEED]        default 1; results in runs/quickstart
# Stages: environment; data; supervised fine-tuning from random weights; DAPO on vLLM, Ray and DeepSpeed; evaluation; report.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
seed=${1:-1}
folder=runs/quickstart

say() { printf '\n== %s\n' "$*" >&2; }
if [ -n "${MEGARL_PYTHON:-}" ]; then # this interpreter as it is; nothing is installed
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  python() { "$MEGARL_PYTHON" "$@"; }
else
  bash launch/env.sh
  export PATH=$root/.venv/bin:$PATH
fi
export HF_HUB_OFFLINE=1
begun=$SECONDS
# With a GPU the engine and the trainer take turns on it. Refused here, and not after the first stages.
settings=$(python tools/quickstart_settings.py) || exit 2
[ -z "$settings" ] || say "on a GPU:" $settings

if [ -e "$folder" ]; then
  # An earlier run is kept, never written over.
  kept=$folder-$(date +%Y%m%d-%H%M%S)
  mv "$folder" "$kept"
  say "the earlier run is now in $kept"
fi

say "1/3  problems and demonstrations"
python tools/make_addition.py "$folder/data"

say "2/3  supervised fine-tuning from random weights: the format is learned, most of the reasoning is wrong"
python -m megarl sft launch/recipes/quickstart_sft.yaml --seed "$seed" >"$folder/sft_summary.json"

say "3/3  DAPO: only the answer is rewarded; 500 held-out problems before and after"
python -m megarl train launch/recipes/quickstart.yaml --seed "$seed" $settings >"$folder/summary.json"

say "done in $((SECONDS - begun)) s; open $folder/report.html"
cat "$folder/summary.json"
