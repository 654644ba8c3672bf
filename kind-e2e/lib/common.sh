# Paths and helpers shared by the scripts of kind-e2e. Sourced, never run.
set -euo pipefail

KIND_E2E=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
REPO=$(dirname "$KIND_E2E")
# Everything that may be thrown away and made again lives under here.
CACHE=${LAMPYRIS_CACHE:-$HOME/.cache/lampyris}
BIN=$CACHE/k8s/bin
SRC=$CACHE/k8s/src
CLUSTER=$CACHE/cluster  # the local cluster: images kept between runs, and
STATE=$CLUSTER/run      # what exists only while it is up
IMAGES=$CACHE/images    # our images as docker-archives

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$CACHE/target}
export PATH=$BIN:$PATH
: "${CARGO:=cargo}"
# A script that a test runs has the variables that cargo gives to a test. Build scripts watch some of them, so a cargo
# that runs here would build half of everything again, and so would the next one outside.
unset "${!CARGO_PKG_@}" "${!CARGO_MANIFEST_@}"

say() { printf '== %s\n' "$*"; }
note() { printf '   %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# step TITLE COMMAND...: announces a step before it starts and says how long it took.
step() {
  local title=$1 begin=$SECONDS
  shift
  say "$title"
  "$@"
  note "$title: $((SECONDS - begin)) s"
}

# wait_for SECONDS WHAT COMMAND...: repeats a quiet command until it succeeds, or ends with an error.
wait_for() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || die "$what did not happen in time"
    sleep 0.1
  done
}

# What no other process shares with this one, now or after a reboot: its id, when it started, and since which boot.
identity() {
  local fields
  fields=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  fields=${fields##*) } # after the name, which may hold anything
  echo "$1 $(cut -d' ' -f20 <<<"$fields") $(cat /proc/sys/kernel/random/boot_id)"
}

# keep_pid FILE PID: remembers a process that outlives this script.
keep_pid() {
  identity "$2" >"$1.identity" && echo "$2" >"$1"
}

# lives FILE: does the process that keep_pid remembered still run? Its number alone may belong to another by now.
lives() {
  [ -s "$1" ] && [ "$(identity "$(cat "$1")")" = "$(cat "$1.identity" 2>/dev/null)" ]
}

# logged LOG COMMAND...: what it prints goes to a file, whose end is shown when it fails.
logged() {
  local log=$1 status=0
  shift
  mkdir -p "$(dirname "$log")"
  # In the background, because errexit does not hold inside a command whose status is looked at.
  ("$@") >"$log" 2>&1 &
  wait $! || status=$?
  [ $status = 0 ] || {
    tail -20 "$log" >&2
    die "$(basename "$log" .log): failed; the whole log is $log"
  }
}

# The comment at the head of the script that runs.
usage() { awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"; }

workspace_version() {
  sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$REPO/Cargo.toml"
}
