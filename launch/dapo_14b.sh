#!/usr/bin/env bash
#SBATCH --job-name=megarl-dapo-14b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=%x-%j.log
#
# One recipe on one node, trainer ranks and engines on GPUs of their own; DAPO on a 14B model unless told otherwise.
#
#   bash   launch/dapo_14b.sh [OPTIONS] [-- OVERRIDES]
#   sbatch launch/dapo_14b.sh [OPTIONS] [-- OVERRIDES]      from the folder that holds launch/
#
#   --recipe FILE      the run (default: launch/recipes/dapo_14b.yaml)
#   --gpus-train N     GPUs of the trainer ranks, the first ones (default: what the recipe's training.layout says)
#   --gpus-engine N    GPUs of the engines, the next ones (default: the recipe's num_engines x engine.tensor)
#   --port N           port of this run's Ray (default: a free one)
#   --cpu              the same processes without GPUs, to rehearse with a small recipe
#   --dry-run          check the recipe, print every command, rank and GPU, and start nothing; needs no GPU and no network
#   -- OVERRIDES       for megarl: -- --steps 10 --rollout.max_staleness 1
#
# GPUs are those of CUDA_VISIBLE_DEVICES, else all of the node. Ends with megarl's exit code: 0 done, 2 the recipe or this
# command are at fault, 130 / 143 ended by a signal. Whatever ends it, what it started has ended, and nothing else has.
set -uo pipefail

READY_WITHIN_S=120 # Ray
TRAINERS_END_WITHIN_S=45
RAY_ENDS_WITHIN_S=15

say() { printf 'dapo_14b.sh: %s\n' "$*" >&2; }
fail() {
  say "error: $*"
  exit 2
}

# sbatch runs a copy of this file, so its own place says nothing there.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -f "$root/megarl/cli.py" ] || root=${SLURM_SUBMIT_DIR:-$PWD}
[ -f "$root/megarl/cli.py" ] || fail "there is no megarl/cli.py in $root; call or submit this script from the folder that holds launch/ and megarl/"
self=$root/launch/dapo_14b.sh

# ------------------------------------------------------------------------------------------------------------- options
recipe=$root/launch/recipes/dapo_14b.yaml
gpus_train='' gpus_engine='' port='' device=cuda dry_run=''
given=("$@")
overrides=()

whole_number() { # OPTION VALUE
  [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || fail "$1 is '$2'; set it to a whole number of at least 1"
}

while [ $# -gt 0 ]; do
  option=$1
  shift
  case $option in
    --recipe=* | --gpus-train=* | --gpus-engine=* | --port=*)
      value=${option#*=}
      option=${option%%=*}
      ;;
    --recipe | --gpus-train | --gpus-engine | --port)
      [ $# -gt 0 ] || fail "$option needs a value"
      value=$1
      shift
      ;;
  esac
  case $option in
    --recipe) recipe=$value ;;
    --gpus-train) whole_number "$option" "$value" && gpus_train=$value ;;
    --gpus-engine) whole_number "$option" "$value" && gpus_engine=$value ;;
    --port) whole_number "$option" "$value" && port=$value ;;
    --cpu) device=cpu ;;
    --dry-run) dry_run=yes ;;
    -h | --help)
      sed -n '/^# One recipe/,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$self"
      exit 0
      ;;
    --)
      overrides=("$@")
      break
      ;;
    *) fail "unknown option '$option'; known are --recipe, --gpus-train, --gpus-engine, --port, --cpu, --dry-run and --help; megarl's own settings go after -- ($self -- --steps 10)" ;;
  esac
done
[ -f "$recipe" ] || fail "recipe $recipe does not exist; set --recipe to a .yaml file (see launch/recipes/)"
recipe=$(cd "$(dirname "$recipe")" && pwd)/$(basename "$recipe")

# -------------------------------------------------------------------------------------------------------------- Python
python=$root/.venv/bin/python
if [ ! -x "$python" ]; then
  python=$(command -v python3 || true)
  if [ -z "$python" ] || ! "$python" -c 'import megarl' 2>/dev/null; then
    fail "there is no environment in $root/.venv, and python3 has no megarl; make it with: bash launch/env.sh"
  fi
fi
PATH=$(dirname "$python"):$PATH # DeepSpeed looks for ninja there
export PATH
cd "$root" || exit 1 # relative paths of a recipe start here

# --------------------------------------------------------------------------------------------------------------- Slurm
host=$(uname -n)
if [ -n "${SLURM_JOB_ID:-}" ]; then
  nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
  [ "$nodes" = 1 ] || fail "the Slurm allocation has $nodes nodes (${SLURM_JOB_NODELIST:-?}), but this script runs on one; allocate one: --nodes=1 (one node is 8 GPUs; more nodes are not supported yet)"
  [ "${SLURM_NTASKS:-1}" = 1 ] || [ -z "${SLURM_STEP_ID:-}" ] || fail "srun started this script ${SLURM_NTASKS} times; start it once: srun --ntasks=1"
  host=${SLURM_JOB_NODELIST:-$host}
fi

# ---------------------------------------------------------------------------------------------------------------- plan
# Reads the resolved recipe; prints: trainer ranks, engines, GPUs an engine, threads a rank, run folder.
PLAN='
import sys, yaml
from megarl.parallel.layout import resolve
wanted_ranks, wanted_engine_gpus = (int(word) if word else None for word in sys.argv[1:3])
tree = yaml.safe_load(sys.stdin)
if "rollout" not in tree:
    sys.exit("the recipe has no rollout section; this script starts megarl train, not megarl sft")
rollout, training = tree["rollout"], tree["training"]
if rollout["placement"] != "disaggregated":
    sys.exit("rollout.placement is %r, but this script gives trainer and engines GPUs of their own; "
             "set it to disaggregated" % rollout["placement"])
layout, engines, tensor = training["layout"], rollout["num_engines"], rollout["engine"]["tensor"]
ranks = wanted_ranks or layout["data"] * layout["sequence"] * layout["tensor"]
if not ranks:
    sys.exit("training.layout.data is 0, so the recipe leaves the number of ranks open; set --gpus-train")
rest = layout["sequence"] * layout["tensor"]
if layout["data"] and ranks != layout["data"] * rest:
    mend = ", or training.layout.data to %d" % (ranks // rest) if ranks % rest == 0 else ""
    sys.exit("--gpus-train is %d, but training.layout is data %d x sequence %d x tensor %d = %d ranks, one a GPU; set "
             "--gpus-train to %d%s" % (ranks, *layout.values(), layout["data"] * rest, layout["data"] * rest, mend))
try:
    layout = resolve(**layout, num_ranks=ranks)
except ValueError as error:
    sys.exit("--gpus-train is %d, one rank a GPU: %s" % (ranks, error))
if (wanted_engine_gpus or engines * tensor) != engines * tensor:
    sys.exit("--gpus-engine is %d, but rollout.num_engines %d x rollout.engine.tensor %d needs %d; set --gpus-engine to %d, "
             "or rollout.num_engines to match" % (wanted_engine_gpus, engines, tensor, engines * tensor, engines * tensor))
samples = rollout["groups_per_step"] * rollout["group_size"] // training["num_mini_batches"]
if samples < layout.data:
    sys.exit("a mini-batch has %d samples for %d data ranks; raise rollout.groups_per_step or group_size, "
             "or lower training.num_mini_batches" % (samples, layout.data))
print(ranks, engines, tensor, training["num_threads"], tree["folder"])
'
resolved=$("$python" -m megarl train "$recipe" ${overrides[@]+"${overrides[@]}"} --print-config) ||
  fail "the recipe does not pass; the message above says why"
plan=$("$python" -c "$PLAN" "$gpus_train" "$gpus_engine" <<<"$resolved" 2>&1) || fail "$recipe: $plan"
read -r num_ranks num_engines tensor threads folder <<<"$plan"

needed=$((num_ranks + num_engines * tensor))
gpus=()
if [ "$device" = cuda ]; then
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -r -a gpus <<<"$CUDA_VISIBLE_DEVICES"
    found="CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES"
  elif [ -n "$dry_run" ]; then
    for ((i = 0; i < needed; i++)); do gpus+=("$i"); done
  else
    count=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || count=0
    for ((i = 0; i < count; i++)); do gpus+=("$i"); done
    found="nvidia-smi lists $count GPUs"
  fi
  [ ${#gpus[@]} -ge $needed ] || fail "$num_ranks trainer ranks and $num_engines engines of $tensor need $needed GPUs, but $found; change the recipe's training.layout and rollout.num_engines, free GPUs, or rehearse with --cpu"
fi
join() { (IFS=, && echo "$*"); }
train_gpus=$(join ${gpus[@]+"${gpus[@]:0:num_ranks}"})
engine_gpus=$(join ${gpus[@]+"${gpus[@]:num_ranks:num_engines * tensor}"})
ray_gpus=$((num_engines * tensor))
[ "$device" = cuda ] || ray_gpus=0

free_port() { "$python" -I -S -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
port=${port:-$(free_port)}

# /tmp and not TMPDIR: Ray's sockets lie inside, and their paths may have 107 characters.
state=/tmp/megarl-$$-$RANDOM
# megarl's rank 0 joins the Ray at RAY_ADDRESS; ranks, Ray and its workers agree on the token.
shared=(RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 MEGARL_LAUNCH="$state")
ray=(env "${shared[@]}" CUDA_VISIBLE_DEVICES="$engine_gpus" setsid
  "$python" -m ray.scripts.scripts start --head --block --disable-usage-stats
  --port="$port" --ray-client-server-port="$(free_port)" --min-worker-port=0 --max-worker-port=0
  --dashboard-agent-listen-port=0 --include-dashboard=false --num-gpus="$ray_gpus" --temp-dir="$state/ray")
healthy=("$python" -m ray.scripts.scripts health-check --address "127.0.0.1:$port")
# torchrun, but with the exit code of the rank that failed first; its own is always 1.
TORCHRUN='
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main(sys.argv[1:])
except ChildFailedError as error:
    code = error.get_first_failure()[1].exitcode
    sys.exit(code if code > 0 else 128 - code)
except SignalException as error:
    sys.exit(128 + error.sigval)
'
torchrun=(--standalone --local-addr 127.0.0.1 --nproc-per-node "$num_ranks" -m megarl train "$recipe" ${overrides[@]+"${overrides[@]}"})
trainers=(env "${shared[@]}" RAY_ADDRESS="127.0.0.1:$port" CUDA_VISIBLE_DEVICES="$train_gpus" OMP_NUM_THREADS="$threads" setsid
  "$python" -c "$TORCHRUN" "${torchrun[@]}")

# What this script started: marked in its environment, in a session of its own, or below one of both.
STARTED='
import os, sys, psutil
leaders, found = {int(word) for word in sys.argv[2:]}, set()
for process in psutil.process_iter():
    try:
        marked = process.environ().get("MEGARL_LAUNCH") == sys.argv[1]
        if (marked or os.getsid(process.pid) in leaders) and process.status() != psutil.STATUS_ZOMBIE:
            found |= {process.pid} | {child.pid for child in process.children(recursive=True)}
    except (psutil.Error, OSError):
        continue
print(*sorted(found))
'

show() { # COMMAND...: as a shell would read it, on one line
  local word line=''
  for word in "$@"; do
    case $word in
      *[!A-Za-z0-9_./:,=%@+-]* | '') line+=" $(printf '%q' "$word")" ;;
      *) line+=" $word" ;;
    esac
  done
  printf '  %s\n' "${line# }"
}

show_plan() {
  local rank engine first on
  echo "recipe    $recipe"
  echo "folder    $folder"
  echo "host      $host"
  echo "python    $python"
  [ ${#overrides[@]} = 0 ] || echo "overrides ${overrides[*]}"
  echo
  printf '%-24s %s\n' process runs\ on
  for ((rank = 0; rank < num_ranks; rank++)); do
    if [ "$device" = cpu ]; then on=CPU; else on="GPU ${gpus[rank]}"; fi
    printf '%-24s %s\n' "trainer rank $rank" "$on"
  done
  for ((engine = 0; engine < num_engines; engine++)); do
    first=$((num_ranks + engine * tensor))
    # Ray deals the engines' GPUs out: each gets as many, in whichever order.
    if [ "$device" = cpu ]; then on=CPU; else on="GPU $(join "${gpus[@]:first:tensor}")"; fi
    printf '%-24s %s\n' "engine $engine (tensor $tensor)" "$on"
  done
  printf '%-24s %s\n' 'rollout service' CPU
  printf '%-24s %s\n' "Ray (port $port)" CPU
  echo
  echo "commands, each with the same random RAY_AUTH_TOKEN in its environment:"
  show "${ray[@]}"
  show "${healthy[@]}"
  # Shown under its usual name; it is called through Python for its ranks' exit codes.
  show env "${shared[@]}" RAY_ADDRESS="127.0.0.1:$port" CUDA_VISIBLE_DEVICES="$train_gpus" OMP_NUM_THREADS="$threads" setsid torchrun "${torchrun[@]}"
}

elsewhere=''
[ "${host%%.*}" = "$(uname -n | cut -d. -f1)" ] || elsewhere=yes
step=(srun --nodes=1 --ntasks=1 --overlap --cpu-bind=none --nodelist="$host" bash "$self" ${given[@]+"${given[@]}"})

if [ -n "$dry_run" ]; then
  show_plan
  if [ -n "$elsewhere" ]; then
    echo
    echo "all of it on $host, the allocation's host, through:"
    show "${step[@]}"
  fi
  echo
  echo "the recipe passes; nothing was started"
  exit 0
fi
if [ -n "$elsewhere" ]; then
  say "this is not the allocation's host; going to $host"
  exec "${step[@]}"
fi

# ------------------------------------------------------------------------------------------------------------- running
ray_pid='' trainers_pid=''

# shellcheck disable=SC2329 # called by clean_up
end() { # PID PATIENCE_S: ask a process to end and give it time; clean_up kills what is left
  local deadline=$((SECONDS + $2))
  kill -TERM "$1" 2>/dev/null || return 0
  while kill -0 "$1" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.2; done
}

# shellcheck disable=SC2329 # called by the trap
clean_up() {
  local code=$? left='' round
  trap - EXIT
  trap '' INT TERM HUP
  [ -z "$trainers_pid" ] || end "$trainers_pid" "$TRAINERS_END_WITHIN_S"
  [ -z "$ray_pid" ] || end "$ray_pid" "$RAY_ENDS_WITHIN_S"
  for ((round = 0; round < 10; round++)); do
    # shellcheck disable=SC2086 # one word a process, none for what was not started
    left=$("$python" -c "$STARTED" "$state" $trainers_pid $ray_pid) && [ -n "$left" ] || break
    # shellcheck disable=SC2086
    kill -KILL $left 2>/dev/null
    sleep 0.2
  done
  [ -z "$left" ] || say "still running after SIGKILL (a driver holds them): $left"
  if [ "$code" = 0 ] || [ "$code" = 2 ] || [ "$code" -ge 128 ]; then
    rm -rf "$state"
  elif [ -d "$state" ]; then
    say "exit code $code; Ray's logs are in $state (remove it when read)"
  fi
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

mkdir -m 700 "$state" || exit 1
RAY_AUTH_TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
show_plan

"${ray[@]}" >"$state/ray.log" 2>&1 </dev/null &
ray_pid=$!
deadline=$((SECONDS + READY_WITHIN_S))
until timeout 20 "${healthy[@]}" >/dev/null 2>&1; do
  if ! kill -0 "$ray_pid" 2>/dev/null || [ "$SECONDS" -ge "$deadline" ]; then
    tail -n 20 "$state/ray.log" >&2
    say "error: Ray was not ready on port $port within $READY_WITHIN_S s (its last lines are above); is the port taken (--port), or /tmp full?"
    exit 1
  fi
  sleep 0.5
done

"${trainers[@]}" </dev/null &
trainers_pid=$!
code=0
wait -n "$trainers_pid" "$ray_pid" || code=$?
if kill -0 "$trainers_pid" 2>/dev/null; then
  tail -n 20 "$state/ray.log" >&2
  say "error: Ray ended with exit code $code while the trainers were running (its last lines are above); ending them"
  exit 1
fi
exit "$code"
