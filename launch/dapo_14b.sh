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
# `megarl launch` in this checkout's environment: one recipe on one node; DAPO on a 14B model unless told otherwise.
#
#   bash   launch/dapo_14b.sh [--recipe FILE] [OPTIONS] [-- OVERRIDES]
#   sbatch launch/dapo_14b.sh [--recipe FILE] [OPTIONS] [-- OVERRIDES]      from the folder that holds launch/
#
# --help shows the options.
set -uo pipefail

fail() {
  printf 'dapo_14b.sh: error: %s\n' "$*" >&2
  exit 2
}

# sbatch runs a copy of this file, so its own place says nothing there.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -f "$root/megarl/cli.py" ] || root=${SLURM_SUBMIT_DIR:-$PWD}
[ -f "$root/megarl/cli.py" ] || fail "there is no megarl/cli.py in $root; call or submit this script from the folder that holds launch/ and megarl/"

recipe=$root/launch/recipes/dapo_14b.yaml
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --recipe=*) recipe=${1#*=} ;;
    --recipe)
      [ $# -gt 1 ] || fail "--recipe needs a value"
      recipe=$2
      shift
      ;;
    *) options+=("$1") ;;
  esac
  shift
done
case $recipe in /*) ;; *) recipe=$PWD/$recipe ;; esac

python=$root/.venv/bin/python
if [ ! -x "$python" ]; then
  python=$(command -v python3 || true)
  if [ -z "$python" ] || ! "$python" -c 'import megarl' 2>/dev/null; then
    fail "there is no environment in $root/.venv, and python3 has no megarl; make it with: bash launch/env.sh"
  fi
fi
cd "$root" || exit 1 # relative paths of a recipe start here
# exec: the signals of bash, sbatch and scancel reach the launcher itself.
exec "$python" -m megarl launch "$recipe" ${options[@]+"${options[@]}"} "$@"
