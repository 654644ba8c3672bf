# What the cluster and the tests need from outside: Debian packages and programs built from Go modules.
# A program is current when the build information inside it names the pinned module version, so no stamp
# file can disagree with it. Sourced after common.sh.

KUBERNETES=v1.36.3 ETCD=v3.6.16 CONTAINERD=v2.2.9 HELM=v4.2.4 CRICTL=v1.34.0 CNI=v1.9.1 COREDNS=v1.15.0
VERSITYGW=v1.8.0 CSI_SANITY=v5.6.0 CRANE=v0.22.1

CLUSTER_PACKAGES=(runc iptables conntrack iproute2 jq openssl socat curl ca-certificates util-linux procps gcc libc6-dev)
BUILD_PACKAGES=(gcc g++ libc6-dev libclang-dev clang cmake pkg-config git jq librocksdb-dev)
TRAIN_PACKAGES=(python3 python3-venv python3-dev python3-numpy python3-torch)

# Installs the named Debian packages that are missing; asks for nothing.
apt_install() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || die "these Debian packages are missing and only root can install them: ${missing[*]}"
  say "apt: ${missing[*]}"
  # A fresh machine may be busy with its own updates.
  apt-get update -qq -o DPkg::Lock::Timeout=300
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends \
    "${missing[@]}" >/dev/null
}

# built_from PROGRAM MODULE VERSION: does the program say that it was built from this version?
built_from() {
  [ -x "$BIN/$1" ] && go version -m "$BIN/$1" | awk -v m="$2" -v v="$3" '$2 == m && $3 == v { found = 1 } END { exit !found }'
}

# go_tool PROGRAM MODULE VERSION PACKAGE [BUILD FLAGS...]: builds one program in an own main module.
go_tool() {
  local program=$1 module=$2 version=$3 package=$4 dir=$SRC/$(basename "$1")
  shift 4
  built_from "$program" "$module" "$version" && return 0
  step "build $program $version" logged "$dir.log" go_build "$dir" "$BIN/$program" "$package@$version" "$@"
}

# go_module FOLDER: goes there, into an own main module.
go_module() {
  mkdir -p "$1" "$BIN"
  cd "$1"
  export CGO_ENABLED=0 GOFLAGS=-mod=mod
  [ -f go.mod ] || printf 'module lampyris.local/%s\n\ngo 1.26\n' "$(basename "$1")" >go.mod
}

go_build() { # go_build FOLDER OUT PACKAGE@VERSION [BUILD FLAGS...]
  local out=$2 package=$3
  go_module "$1"
  shift 3
  mkdir -p "$(dirname "$out")"
  go get -tool "$package"
  go build "$@" -o "$out" "${package%@*}"
}

# k8s.io/kubernetes requires its staging modules at v0.0.0 and replaces them by folders that the module zip
# lacks. Replaces are not inherited, so an own main module repeats its requirements with real versions.
kubernetes_module() {
  local dir staging minor
  dir=$(go mod download -json "k8s.io/kubernetes@$KUBERNETES" | jq -r .Dir)
  staging=${KUBERNETES/v1./v0.}
  sed -E -e 's|^module .*|module lampyris.local/kubernetes|' -e '/^replace \(/,/^\)/d' \
    -e "s#^(\s+k8s.io/[a-z-]+) v0\.0\.0(\s|\$)#\1 $staging\2#" "$dir/go.mod"
  printf 'require k8s.io/kubernetes %s\nreplace (\n' "$KUBERNETES"
  awk -v v="$staging" '/^\tk8s.io\/[a-z-]+ v0\.0\.0( |$)/ { print "\t" $1 " => " $1 " " v }' "$dir/go.mod" | sort -u
  printf ')\n'
  cp "$dir/go.sum" go.sum
  chmod u+w go.sum
}

KUBERNETES_PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)

build_kubernetes() {
  local flags="-s -w" package minor
  minor=$(cut -d. -f2 <<<"$KUBERNETES")
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    flags+=" -X $package.gitVersion=$KUBERNETES -X $package.gitMajor=1 -X $package.gitMinor=$minor"
    flags+=" -X $package.gitTreeState=clean -X $package.gitCommit=modules"
  done
  go_module "$1"
  kubernetes_module >go.mod.new
  mv go.mod.new go.mod
  go build -o "$BIN/" -ldflags "$flags" "${KUBERNETES_PROGRAMS[@]/#/k8s.io/kubernetes/cmd/}"
}

kubernetes() {
  local program
  for program in "${KUBERNETES_PROGRAMS[@]}"; do
    built_from "$program" k8s.io/kubernetes $KUBERNETES && continue
    step "build Kubernetes $KUBERNETES (about five minutes)" logged $SRC/kubernetes.log build_kubernetes $SRC/kubernetes
    return
  done
}

containerd() {
  local program
  for program in containerd containerd-shim-runc-v2 ctr; do
    go_tool $program github.com/containerd/containerd/v2 $CONTAINERD "github.com/containerd/containerd/v2/cmd/$program" \
      -tags no_btrfs,no_zfs,no_devmapper -ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=$CONTAINERD"
  done
}

# CoreDNS with the few plugins that a cluster's own names need.
coredns() {
  built_from coredns github.com/coredns/coredns $COREDNS && return
  step "build coredns $COREDNS" logged "$SRC/coredns.log" coredns_build "$SRC/coredns"
}

coredns_build() {
  go_module "$1"
  cp "$KIND_E2E/manifests/coredns.go.txt" main.go
  go get "github.com/coredns/coredns@$COREDNS"
  go build -ldflags "-s -w" -o "$BIN/coredns" .
}

need_go() {
  local version
  command -v go >/dev/null || die "Go 1.26 or newer must be on the PATH"
  version=$(go env GOVERSION) # go1.26.3
  [ "$(printf '%s\n' go1.26 "$version" | sort -V | head -1)" = go1.26 ] || die "Go 1.26 or newer must be on the PATH, not $version"
}

# The Rust that the project pins; rustup may be set not to install by itself what is missing.
toolchain() {
  if command -v rustup >/dev/null; then (cd "$REPO" && rustup toolchain install >/dev/null 2>&1) || true; fi
  (cd "$REPO" && cargo --version)
}

cluster_tools() {
  local plugin
  need_go
  apt_install "${CLUSTER_PACKAGES[@]}"
  kubernetes
  containerd
  go_tool etcd go.etcd.io/etcd/server/v3 $ETCD go.etcd.io/etcd/server/v3 -ldflags "-s -w"
  go_tool helm helm.sh/helm/v4 $HELM helm.sh/helm/v4/cmd/helm -ldflags "-s -w"
  go_tool crictl sigs.k8s.io/cri-tools $CRICTL sigs.k8s.io/cri-tools/cmd/crictl -ldflags "-s -w"
  for plugin in main/bridge main/loopback ipam/host-local meta/portmap; do
    go_tool "cni/${plugin##*/}" github.com/containernetworking/plugins $CNI \
      "github.com/containernetworking/plugins/plugins/$plugin" -ldflags "-s -w"
  done
  coredns
}

# The real S3 server and the CSI conformance suite.
test_tools() {
  need_go
  go_tool versitygw github.com/versity/versitygw $VERSITYGW github.com/versity/versitygw/cmd/versitygw -ldflags "-s -w"
  go_tool csi-sanity github.com/kubernetes-csi/csi-test/v5 $CSI_SANITY github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity -ldflags "-s -w"
}

crane_tool() {
  go_tool crane github.com/google/go-containerregistry $CRANE github.com/google/go-containerregistry/cmd/crane -ldflags "-s -w"
}
