# A node of the local cluster is a mount, network and UTS namespace. The paths that charts and drivers expect
# (/var/lib/kubelet, /run/containerd, ...) are bound inside it to folders of its own, so nothing reaches the
# machine's own mounts or network. Nodes meet at a bridge inside node 1's network namespace.
# Sourced after common.sh.

NODES=3
NODE_NET=10.90.0 POD_NET=10.91 SERVICE_NET=10.92 DNS_IP=10.92.0.10
API=https://$NODE_NET.1:6443
API_PORT=${LAMPYRIS_API_PORT:-16443}
KUBECONFIG_OUT=$CLUSTER/kubeconfig
DISKS_PER_NODE=6
CGROUPS=/sys/fs/cgroup
# Another cache is another cluster: its cgroups are not ours.
CGROUP=lampyris-$(cksum <<<"$CLUSTER" | cut -d' ' -f1)-node

node_numbers() { seq $NODES; }

# Accepts "2" and "node-2".
node_number() {
  local n=${1#node-}
  [[ $n =~ ^[0-9]+$ ]] && [ "$n" -ge 1 ] && [ "$n" -le $NODES ] || die "no such node: '$1' (there are node-1 to node-$NODES)"
  echo "$n"
}

node_pid() { cat "$STATE/node-$1/pid"; }
# A node has a mount namespace of its own: whoever ends "every process of a node" must never mean the machine.
node_lives() { lives "$STATE/node-$1/pid" && [ ! "/proc/$(node_pid "$1")/ns/mnt" -ef /proc/self/ns/mnt ]; }

in_node() { # in_node NUMBER COMMAND...
  local i=$1
  shift
  nsenter -t "$(node_pid "$i")" -m -n -u --wd=/ "$@"
}

# daemon NUMBER NAME COMMAND...: a process of the node that outlives this script. It gets a clean environment
# and none of our descriptors, else whoever reads this script's output would wait for it.
daemon() {
  local i=$1 name=$2
  shift 2
  # exec all the way: $! is the daemon itself, and no shell stays behind to wait for it.
  (exec nsenter -t "$(node_pid "$i")" -m -n -u --wd=/ env -i PATH="$PATH" HOME=/ setsid "$@" \
    >>"$STATE/node-$i/log/$name.log" 2>&1 </dev/null) &
  keep_pid "$STATE/node-$i/$name.pid" $!
  disown
}

unified_cgroups() { [ -f $CGROUPS/cgroup.controllers ]; }

make_cgroups() { # make_cgroups NUMBER
  local dir controller
  if unified_cgroups; then
    for controller in cpu memory pids cpuset io; do
      echo "+$controller" >$CGROUPS/cgroup.subtree_control ||
        die "cgroup v2: $CGROUPS/cgroup.subtree_control does not take '+$controller', and kubelet needs that controller"
    done
    mkdir -p "$CGROUPS/$CGROUP-$1"
    return
  fi
  for dir in $CGROUPS/*/; do
    [ "$(basename "$dir")" = unified ] || mkdir -p "$dir/$CGROUP-$1"
  done
  for dir in cpuset.cpus cpuset.mems; do
    cat "$CGROUPS/cpuset/$dir" >"$CGROUPS/cpuset/$CGROUP-$1/$dir"
  done
}

node_cgroups() { # every cgroup root of a node, or of all nodes with '*'
  local pattern=$1
  # shellcheck disable=SC2086
  ls -d $CGROUPS/$CGROUP-$pattern $CGROUPS/*/$CGROUP-$pattern 2>/dev/null || true
}

make_node() { # make_node NUMBER: its namespaces, mounts, link and containerd; keeps what a reboot would keep
  local i=$1 dir=$STATE/node-$1 keep=$CLUSTER/containerd/node-$1 disk
  rm -rf --one-file-system "$dir"/{pid,holder,run-containerd,netns}
  mkdir -p "$keep" "$dir"/{kubelet/seccomp,run-containerd,cni,cni-state,pods-log,containers-log,netns,log,etcd}
  for disk in $(seq $DISKS_PER_NODE); do mkdir -p "$dir/kubelet/disks/disk-$disk"; done
  (exec unshare --mount --net --uts --propagation private bash -c "
    hostname node-$i; mount --make-rshared /; touch $dir/holder; exec sleep infinity" >/dev/null 2>&1 </dev/null) &
  keep_pid "$dir/pid" $!
  disown
  wait_for 10 "node-$i's namespaces" test -e "$dir/holder"
  in_node "$i" bash -euc "
    bind() { mkdir -p \$2; mount --bind \$1 \$2; mount --make-rshared \$2; }
    bind $keep /var/lib/containerd
    bind $dir/kubelet /var/lib/kubelet
    bind $dir/run-containerd /run/containerd
    bind $dir/cni /etc/cni
    bind $dir/cni-state /var/lib/cni
    bind $dir/pods-log /var/log/pods
    bind $dir/containers-log /var/log/containers
    bind $dir/netns /run/netns
    ip link set lo up
    echo 1 >/proc/sys/net/ipv4/ip_forward"
  make_cgroups "$i"
  write_node_config "$i" "$dir"
  daemon "$i" containerd containerd -c "$dir/containerd.toml"
}

link_node() { # link_node NUMBER: (re)connects a node to the bridge in node 1
  local i=$1 other
  if ! in_node 1 ip link show nodes >/dev/null 2>&1; then
    in_node 1 bash -euc "ip link add nodes type bridge; ip link set nodes up; ip addr add $NODE_NET.1/24 dev nodes"
  fi
  if [ "$i" != 1 ] && ! in_node "$i" ip link show eth0 >/dev/null 2>&1; then
    # The end in node 1 outlives a killed node for a moment. Both ends are made where they belong.
    in_node 1 bash -euc "ip link del lpa$i 2>/dev/null || true
      ip link add lpa$i type veth peer name eth0 netns $(node_pid "$i")
      ip link set lpa$i master nodes; ip link set lpa$i up"
    in_node "$i" ip addr add "$NODE_NET.$i/24" dev eth0
  fi
  [ "$i" = 1 ] || in_node "$i" bash -euc "ip link set eth0 up; ip route replace default via $NODE_NET.1"
  for other in $(node_numbers); do
    [ "$other" = "$i" ] || in_node "$i" ip route replace "$POD_NET.$other.0/24" via "$NODE_NET.$other"
  done
}

write_node_config() { # write_node_config NUMBER DIR
  local i=$1 dir=$2
  mkdir -p "$dir/cni/net.d"
  jq -n --arg subnet "$POD_NET.$i.0/24" '{cniVersion: "1.0.0", name: "pods", plugins: [
    {type: "bridge", bridge: "cni0", isGateway: true, ipMasq: true, hairpinMode: true,
     ipam: {type: "host-local", ranges: [[{subnet: $subnet}]], routes: [{dst: "0.0.0.0/0"}]}},
    {type: "portmap", capabilities: {portMappings: true}}]}' >"$dir/cni/net.d/10-pods.conflist"
  # restrict_oom_score_adj: a machine without CAP_SYS_RESOURCE cannot lower a score, and every sandbox asks for it.
  cat >"$dir/containerd.toml" <<T
version = 3
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
      BinaryName = "$(command -v runc)"
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["$BIN/cni"]
    conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "lampyris.local/pause:1"
T
  cat >"$dir/kubelet.yaml" <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $NODE_NET.$i
healthzBindAddress: $NODE_NET.$i
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $STATE/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $STATE/pki/node-$i.crt
tlsPrivateKeyFile: $STATE/pki/node-$i.key
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP-$i
failCgroupV1: false
failSwapOn: false
maxOpenFiles: 20000
oomScoreAdj: 0
enforceNodeAllocatable: []
protectKernelDefaults: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
clusterDNS: ["$DNS_IP"]
clusterDomain: cluster.local
resolvConf: ""
podLogsDir: /var/log/pods
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
shutdownGracePeriod: 0s
Y
}

start_node() { # start_node NUMBER: kubelet and kube-proxy, once containerd answers and knows the pause image
  local i=$1 dir=$STATE/node-$1
  wait_for 30 "containerd on node-$i" in_node "$i" ctr version
  load_image "$i" "$STATE/pause.tar"
  daemon "$i" kubelet kubelet --config="$dir/kubelet.yaml" --kubeconfig="$STATE/pki/node-$i.kubeconfig" \
    --hostname-override="node-$i" --node-ip="$NODE_NET.$i" --root-dir=/var/lib/kubelet --cert-dir="$dir/kubelet-pki" \
    --node-labels="topology.kubernetes.io/zone=zone-$i" --v=2
  daemon "$i" kube-proxy kube-proxy --kubeconfig="$STATE/pki/proxy.kubeconfig" --proxy-mode=iptables \
    --cluster-cidr="$POD_NET.0.0/16" --conntrack-max-per-core=0 --conntrack-min=0 --oom-score-adj=0 \
    --hostname-override="node-$i" --healthz-bind-address="$NODE_NET.$i:10256" --metrics-bind-address=127.0.0.1:10249 --v=1
}

# Every process of a node: daemons and shims by the mount namespace that they live in, containers by cgroup.
node_processes() {
  local process namespace dir
  if node_lives "$1"; then
    namespace=/proc/$(node_pid "$1")/ns/mnt
    for process in /proc/[0-9]*; do
      [ ! "$process/ns/mnt" -ef "$namespace" ] || echo "${process#/proc/}"
    done
  fi
  for dir in $(node_cgroups "$1"); do
    find "$dir" -name cgroup.procs -exec cat {} + 2>/dev/null || true
  done
}

# Ends every process of a node but those named. The one that holds the namespaces is best named: without it the
# others cannot be found any more.
end_processes() { # end_processes NUMBER KEEP...
  local i=$1 round pids
  shift
  for round in $(seq 50); do
    pids=$(node_processes "$i" | sort -u | grep -vxF -e "${1:-none}" -e "${2:-none}" || true)
    [ -n "$pids" ] || return 0
    # shellcheck disable=SC2086
    kill -9 $pids 2>/dev/null || true
    sleep 0.1
  done
  note "processes of node-$i do not end: $(echo $pids)"
}

kill_node() { # as if its power went
  local holder=none
  if node_lives "$1"; then holder=$(node_pid "$1"); fi
  end_processes "$1" "$holder"
  [ "$holder" = none ] || kill -9 "$holder" 2>/dev/null || true
  rm -f "$STATE/node-$1/pid"
}

# Ends a node but keeps its images: what containerd remembers of pods goes while it can still be asked.
retire_node() {
  local i=$1
  if node_lives "$i"; then
    end_processes "$i" "$(node_pid "$i")" "$(cat "$STATE/node-$i/containerd.pid")"
    in_node "$i" bash -c '
      timeout 20 ctr -n k8s.io containers ls -q | xargs -r timeout 20 ctr -n k8s.io containers rm
      timeout 20 ctr -n k8s.io sandboxes ls | awk "NR > 1 { print \$1 }" | xargs -r timeout 20 ctr -n k8s.io sandboxes rm
    ' >/dev/null 2>&1 || true
  fi
  kill_node "$i"
}

remove_cgroups() {
  local round dir
  for round in $(seq 50); do
    for dir in $(node_cgroups '*'); do
      find "$dir" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    done
    [ -n "$(node_cgroups '*')" ] || return 0
    sleep 0.1
  done
  note "cgroups are still in use: $(node_cgroups '*' | head -1)"
}
