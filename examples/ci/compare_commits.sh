#!/usr/bin/env bash
# Is HEAD slower than BASE? Benches two commits of the repository you stand in, in turns, on this
# machine, and compares them.
#
#   compare_commits.sh BASE HEAD [arguments of weft bench...]
#   compare_commits.sh origin/main HEAD softmax --with kernels/mine.py
#
# Exit 0: nothing is slower or broken; 1: something is; 2: the call was wrong. The Markdown table
# goes to stdout, talk to stderr. In the environment:
#   ROUNDS       runs of each commit (default 4: from four on, runs are pooled to an interval)
#   RECORDS      the records' file (default weft-records.jsonl; must not be there yet)
#   WEFT         the command (default: weft)
#   COMPARE      more arguments of weft compare, split at spaces: "--threshold 0.03"
set -euo pipefail

wrong() { echo "error: $1" >&2 && exit 2; }
(($# >= 2)) || wrong "expected BASE HEAD [arguments of weft bench...], got $# arguments"
commit() { git rev-parse --verify --quiet "$1^{commit}"; }
base=$(commit "$1") || wrong "no such commit: $1 (is the checkout shallow?)"
head=$(commit "$2") || wrong "no such commit: $2"
[ "$base" != "$head" ] || wrong "BASE and HEAD are one commit, $base"
shift 2
rounds=${ROUNDS:-4}
[[ $rounds =~ ^[1-9][0-9]*$ ]] || wrong "ROUNDS: expected 1 or more, got $rounds"
records=$(realpath -m "${RECORDS:-weft-records.jsonl}")
[ ! -e "$records" ] || wrong "$records is there already: older runs would be mixed with these"
read -ra weft <<<"${WEFT:-weft}"
read -ra compare <<<"${COMPARE:-}"

# Each commit in a tree of its own, so that neither sees the other's files or build.
trees=$(mktemp -d)
tidy() {
  for tree in "$trees"/*; do git worktree remove --force "$tree" 2>/dev/null || true; done
  rm -rf "$trees"
}
trap tidy EXIT
git worktree add --quiet --detach "$trees/$base" "$base"
git worktree add --quiet --detach "$trees/$head" "$head"

run() { # run COMMIT arguments...: exit code 1 is a verdict on a candidate, which the record holds
  local commit=$1 code=0
  shift
  (
    cd "$trees/$commit"
    # In Weft's own repository it is Weft itself that changes.
    if [ -d src/weft ]; then export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"; fi
    WEFT_COMMIT=$commit "${weft[@]}" bench "$@" --save "$records" >/dev/null
  ) || code=$?
  ((code <= 1)) || wrong "weft bench ended with $code at ${commit:0:12}"
}

# In turns, the order drawn for each round: a machine that grows warm or busy does so for both.
for ((round = 1; round <= rounds; round++)); do
  for commit in $(shuf -e "$base" "$head"); do
    echo "round $round of $rounds: ${commit:0:12}" >&2
    run "$commit" "$@"
  done
done
[ -s "$records" ] || wrong "nothing was measured"
"${weft[@]}" compare "$records" --commits "$base" "$head" --markdown ${compare[@]+"${compare[@]}"}
