# Container images without a registry or a daemon: docker-archives written with tar, and loading them.
# Sourced after node.sh.

# archive REFERENCE OUT USER ENTRYPOINT FOLDER...: one layer for each folder; equal folders give an equal archive.
archive() {
  local reference=$1 out=$2 user=$3 entrypoint=$4 work folder digest config digests=() layers=()
  shift 4
  work=$(mktemp -d "$(dirname "$out")/.archive.XXXXXX")
  for folder in "$@"; do
    tar --sort=name --mtime=@0 --numeric-owner --owner=0 --group=0 --format=gnu -C "$folder" -cf "$work/layer" .
    digest=$(sha256sum "$work/layer" | cut -d' ' -f1)
    mv "$work/layer" "$work/$digest.tar"
    digests+=("sha256:$digest")
    layers+=("$digest.tar")
  done
  jq -nc --arg user "$user" --arg entry "$entrypoint" '{architecture: "amd64", os: "linux", created: "1970-01-01T00:00:00Z",
    config: {Entrypoint: [$entry], User: $user, Env: ["PATH=/usr/bin:/bin"]},
    rootfs: {type: "layers", diff_ids: $ARGS.positional}}' --args "${digests[@]}" >"$work/config"
  config=$(sha256sum "$work/config" | cut -d' ' -f1)
  mv "$work/config" "$work/$config.json"
  jq -nc --arg reference "$reference" --arg config "$config.json" \
    '[{Config: $config, RepoTags: [$reference], Layers: $ARGS.positional}]' --args "${layers[@]}" >"$work/manifest.json"
  tar --mtime=@0 --owner=0 --group=0 -C "$work" -cf "$out.new" manifest.json "$config.json" "${layers[@]}"
  mv "$out.new" "$out"
  rm -rf "$work"
}

archive_reference() { tar -xOf "$1" manifest.json | jq -r '.[0].RepoTags[0]'; }
archive_config() { tar -xOf "$1" manifest.json | jq -r '.[0].Config | rtrimstr(".json")'; }

node_image() { # node_image NUMBER REFERENCE: the config digest of the image that a node has under this name
  in_node "$1" crictl --runtime-endpoint unix:///run/containerd/containerd.sock inspecti -o json "$2" 2>/dev/null |
    jq -r '.status.id | ltrimstr("sha256:")' 2>/dev/null || true
}

load_image() { # load_image NUMBER ARCHIVE: imports unless the node has exactly this image
  local i=$1 file=$2 reference config old
  reference=$(archive_reference "$file")
  config=$(archive_config "$file")
  old=$(node_image "$i" "$reference")
  [ "$old" != "$config" ] || return 0
  in_node "$i" ctr -n k8s.io images import --local "$file" >/dev/null 2> >(grep -v DEPRECATION: >&2)
  # The CRI keeps an extra name for every config digest; without this the replaced image would never be collected.
  if [ -n "$old" ]; then
    in_node "$i" ctr -n k8s.io images rm "sha256:$old" >/dev/null 2>&1 || true
    echo "$reference" >>"$STATE/replaced"
  fi
  wait_for 20 "$reference on node-$i" test_node_image "$i" "$reference" "$config"
}

test_node_image() { [ "$(node_image "$1" "$2")" = "$3" ]; }

load_on_node() { # load_on_node NUMBER ARCHIVE...
  local i=$1 file
  shift
  for file in "$@"; do load_image "$i" "$file"; done
}

load_everywhere() { # load_everywhere ARCHIVE...: all nodes at once
  local i pids=() pid failed=0
  for i in $(node_numbers); do
    node_lives "$i" || continue
    load_on_node "$i" "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  [ $failed = 0 ] || die "an image could not be loaded on every node"
}

# The two images of the cluster itself.
base_images() {
  mkdir -p "$STATE/pause" "$STATE/coredns"
  gcc -O1 -static -o "$STATE/pause/pause" "$KIND_E2E/manifests/pause.c"
  archive lampyris.local/pause:1 "$STATE/pause.tar" 65535:65535 /pause "$STATE/pause"
  cp "$BIN/coredns" "$STATE/coredns/"
  archive lampyris.local/coredns:1 "$STATE/coredns.tar" 65534:65534 /coredns "$STATE/coredns"
}
