#!/usr/bin/env bash
# Compare the speed of two commits of the current repository: bench both on this machine, in alternation.
#
#   compare_commits.sh BASE HEAD [arguments of weft bench...]
#   compare_commits.sh origin/main HEAD softmax --with kernels/mine.py
#
# Exit codes: 0 nothing is slower or broken; 1 something is; 2 invalid arguments. The Markdown table goes to
# stdout, progress to stderr. Environment variables:
#   ROUNDS       runs of each commit (default 4: four or more runs are pooled into one interval)
#   RECORDS      file for the records (default weft-records.jsonl; it must not exist)
#   WEFT         the command (default: weft)
#   COMPARE      additional arguments of weft compare, split at spaces: "--threshold 0.03"
set -euo pipefail

fail() { echo "error: $1" >&2 && exit 2; }
(($# >= 2)) || fail "expected BASE HEAD [arguments of weft bench...], got $# arguments"
resolve() { git rev-parse --verify --quiet "$1^{commit}"; }
base=$(resolve "$1") || fail "no such commit: $1 (is the checkout shallow?)"
head=$(resolve "$2") || fail "no such commit: $2"
[ "$base" != "$head" ] || fail "BASE and HEAD are one commit, $base"
shift 2
rounds=${ROUNDS:-4}
[[ $rounds =~ ^[1-9][0-9]*$ ]] || fail "ROUNDS: expected 1 or more, got $rounds"
records=$(realpath -m "${RECORDS:-weft-records.jsonl}")
[ ! -e "$records" ] || fail "$records already exists: older runs would be mixed with these"
read -ra weft <<<"${WEFT:-weft}"
read -ra compare <<<"${COMPARE:-}"

# Each commit has a worktree of its own, so that neither sees the files or the build of the other.
trees=$(mktemp -d)
remove_worktrees() {
  for tree in "$trees"/*; do git worktree remove --force "$tree" 2>/dev/null || true; done
  rm -rf "$trees"
}
trap remove_worktrees EXIT
git worktree add --quiet --detach "$trees/$base" "$base"
git worktree add --quiet --detach "$trees/$head" "$head"

bench() { # bench COMMIT arguments...: exit code 1 means that an implementation failed; the record says so
  local commit=$1 code=0
  shift
  (
    cd "$trees/$commit"
    # In Weft's own repository, measure the Weft of this commit and not the installed one.
    if [ -d src/weft ]; then export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"; fi
    WEFT_COMMIT=$commit "${weft[@]}" bench "$@" --save "$records" >/dev/null
  ) || code=$?
  ((code <= 1)) || fail "weft bench ended with $code at ${commit:0:12}"
}

# Alternate the commits in random order, so that a warm or busy machine affects both.
for ((round = 1; round <= rounds; round++)); do
  for commit in $(shuf -e "$base" "$head"); do
    echo "round $round of $rounds: ${commit:0:12}" >&2
    bench "$commit" "$@"
  done
done
[ -s "$records" ] || fail "nothing was measured"
"${weft[@]}" compare "$records" --commits "$base" "$head" --markdown ${compare[@]+"${compare[@]}"}
