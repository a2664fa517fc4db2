#!/usr/bin/env bash
#SBATCH --job-name=megarl-dapo-14b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
# `megarl run` in this checkout's environment: DAPO on a 14B model unless told otherwise.
#
#   sbatch launch/dapo_14b.sh [--recipe FILE] [OPTIONS] [SETTINGS]      from the folder that holds launch/
#   bash   launch/dapo_14b.sh ...      on one node without Slurm
#
# --help shows the options. docs/slurm.md tells of signals, requeues and logs.

# sbatch runs a copy of this file, so its own place says nothing there.
SCRIPT=dapo_14b.sh
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -f "$root/launch/run.sh" ] || root=${SLURM_SUBMIT_DIR:-$PWD}
[ -f "$root/launch/run.sh" ] || {
  printf '%s: error: there is no launch/run.sh in %s; call or submit this script from the folder that holds launch/ and megarl/\n' "$SCRIPT" "$root" >&2
  exit 2
}
. "$root/launch/run.sh"
run_recipe launch/recipes/dapo_14b.yaml "$@"
