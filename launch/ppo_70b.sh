#!/usr/bin/env bash
#SBATCH --job-name=megarl-ppo-70b
#SBATCH --nodes=12
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
# PPO on a 70B model: policy, critic, reference and reward model apart, on 12 nodes. Planned, not run.
#
#   sbatch launch/ppo_70b.sh [--recipe FILE] [OPTIONS] [SETTINGS]      from the folder that holds launch/
#   bash   launch/ppo_70b.sh ...      with --dry-run --nodes 12 --gpus-per-node 8: the plan
#
# --help shows the options. docs/slurm.md tells of signals, requeues and logs.

# sbatch runs a copy of this file, so its own place says nothing there.
SCRIPT=ppo_70b.sh
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -f "$root/launch/run.sh" ] || root=${SLURM_SUBMIT_DIR:-$PWD}
[ -f "$root/launch/run.sh" ] || {
  printf '%s: error: there is no launch/run.sh in %s; call or submit this script from the folder that holds launch/ and megarl/\n' "$SCRIPT" "$root" >&2
  exit 2
}
. "$root/launch/run.sh"
run_recipe launch/recipes/ppo_70b_apart.yaml "$@"
