# Sourced by the launch scripts beside it: `megarl run` in this checkout's environment.
#   run_recipe RECIPE [--recipe FILE] [OPTIONS] [SETTINGS]      OPTIONS: megarl run --help
# `root`, the folder that holds launch/ and megarl/, is set by the script.
# shellcheck shell=bash
set -uo pipefail

fail() {
  printf '%s: error: %s\n' "$(basename "${SCRIPT:-launch/run.sh}")" "$*" >&2
  exit 2
}

run_recipe() {
  local recipe=$root/$1 options=() python
  shift
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
  exec "$python" -m megarl run "$recipe" ${options[@]+"${options[@]}"} "$@"
}
