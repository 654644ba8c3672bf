# etcd, the Kubernetes control plane on node 1, and the forwarder that makes its API reachable at 127.0.0.1.
# Sourced after node.sh.

AUDIT_LOG=$STATE/node-1/log/audit.log

kubectl_admin() { in_node 1 kubectl --kubeconfig="$STATE/pki/admin.kubeconfig" "$@"; }

start_etcd() {
  # Durable only against the end of processes: a test cluster does not outlive its machine.
  daemon 1 etcd etcd --data-dir "$STATE/node-1/etcd" --unsafe-no-fsync \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster default=http://127.0.0.1:2380
}

start_apiserver() {
  local pki=$STATE/pki
  daemon 1 apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 \
    --advertise-address=$NODE_NET.1 --bind-address=0.0.0.0 --secure-port=6443 \
    --service-cluster-ip-range=$SERVICE_NET.0.0/16 --allow-privileged=true \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
    --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate="$pki/kubelet-client.crt" --kubelet-client-key="$pki/kubelet-client.key" \
    --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
    --requestheader-client-ca-file="$pki/ca.crt" --requestheader-allowed-names=front-proxy \
    --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
    --requestheader-extra-headers-prefix=X-Remote-Extra- --enable-aggregator-routing=true \
    --proxy-client-cert-file="$pki/front-proxy.crt" --proxy-client-key-file="$pki/front-proxy.key" \
    --audit-policy-file="$KIND_E2E/manifests/audit-policy.yaml" --audit-log-path="$AUDIT_LOG" --v=1
}

start_controllers() {
  local pki=$STATE/pki
  daemon 1 controller-manager kube-controller-manager --kubeconfig="$pki/controller-manager.kubeconfig" \
    --authentication-kubeconfig="$pki/controller-manager.kubeconfig" \
    --authorization-kubeconfig="$pki/controller-manager.kubeconfig" \
    --service-account-private-key-file="$pki/sa.key" --root-ca-file="$pki/ca.crt" \
    --cluster-signing-cert-file="$pki/ca.crt" --cluster-signing-key-file="$pki/ca.key" \
    --use-service-account-credentials=true --leader-elect=false --node-monitor-grace-period=16s --v=1
  daemon 1 scheduler kube-scheduler --kubeconfig="$pki/scheduler.kubeconfig" \
    --authentication-kubeconfig="$pki/scheduler.kubeconfig" \
    --authorization-kubeconfig="$pki/scheduler.kubeconfig" --leader-elect=false --v=1
}

start_control_plane() {
  start_etcd
  start_apiserver
  wait_for 60 "the API server" kubectl_admin get --raw /readyz
  start_controllers
  start_cleaner
  start_forwarder
}

# 127.0.0.1 of the machine -> a socket file -> the API server inside node 1. The socket file is the only
# thing that both network namespaces share, so the machine gets no link and no route.
start_forwarder() {
  rm -f "$STATE/api.sock"
  daemon 1 forwarder bash -c "cd $STATE && exec socat UNIX-LISTEN:api.sock,fork TCP:127.0.0.1:6443"
  if ! forwarder_lives; then
    (
      cd "$STATE"
      exec env -i PATH="$PATH" setsid socat "TCP-LISTEN:$API_PORT,bind=127.0.0.1,reuseaddr,fork" UNIX-CONNECT:api.sock \
        >"$STATE/forwarder.log" 2>&1 </dev/null
    ) &
    keep_pid "$STATE/forwarder.pid" $!
    disown
  fi
  wait_for 20 "127.0.0.1:$API_PORT (see $STATE/forwarder.log; LAMPYRIS_API_PORT chooses another port)" \
    kubectl --kubeconfig="$KUBECONFIG_OUT" get --raw /readyz
}

forwarder_lives() { lives "$STATE/forwarder.pid"; }

stop_forwarder() {
  # Its group: the listener and one child for each open connection.
  if forwarder_lives; then kill -- "-$(cat "$STATE/forwarder.pid")" 2>/dev/null || true; fi
}

# The volumes are folders made beforehand. What an administrator would do when a claim is deleted, the cleaner
# does: wipe the folder and offer the volume again. A claim that still exists keeps its data.
start_cleaner() {
  daemon 1 cleaner bash "$KIND_E2E/lib/cleaner.sh" "$STATE"
}

apply_base() {
  local i disk
  kubectl_admin apply -f - >/dev/null <"$KIND_E2E/manifests/base.yaml"
  for i in $(node_numbers); do
    for disk in $(seq $DISKS_PER_NODE); do
      sed -e "s/@NODE@/node-$i/g" -e "s/@DISK@/disk-$disk/g" "$KIND_E2E/manifests/volume.yaml"
    done
  done | kubectl_admin apply -f - >/dev/null
}

start_dns() {
  sed "s/@DNS@/$DNS_IP/" "$KIND_E2E/manifests/coredns.yaml" | kubectl_admin apply -f - >/dev/null
  kubectl_admin -n kube-system rollout status deploy/coredns --timeout=120s >/dev/null
}
