# Which Kubernetes the demo and the cluster tests use, and how our images get there. Sourced after deps.sh.

# choose_kubernetes: sets KUBERNETES_IS to given, kind or local.
choose_kubernetes() {
  case ${KUBECONFIG:-} in
    '' | "$CLUSTER/kubeconfig" | "$CLUSTER/kind-kubeconfig")
      if docker version >/dev/null 2>&1 && command -v kind >/dev/null; then KUBERNETES_IS=kind; else KUBERNETES_IS=local; fi
      ;;
    *)
      [ -n "${LAMPYRIS_REGISTRY:-}" ] || die "KUBECONFIG is set, so images must be pushed to a registry that this cluster can pull from:
  set LAMPYRIS_REGISTRY to it, as host/path, or unset KUBECONFIG to use a cluster on this machine"
      KUBERNETES_IS=given
      ;;
  esac
  say "Kubernetes: $KUBERNETES_IS"
}

bring_up() {
  case $KUBERNETES_IS in
    given) kubectl get nodes ;;
    kind)
      kind get clusters | grep -qx lampyris || kind create cluster --name lampyris --config "$KIND_E2E/manifests/kind.yaml"
      export KUBECONFIG=$CLUSTER/kind-kubeconfig
      mkdir -p "$CLUSTER"
      kind get kubeconfig --name lampyris >"$KUBECONFIG"
      ;;
    local)
      "$KIND_E2E/cluster" up
      export KUBECONFIG=$CLUSTER/kubeconfig
      ;;
  esac
}

take_down() { # a cluster on this machine; a given one is not ours
  case $KUBERNETES_IS in
    kind) kind delete cluster --name lampyris ;;
    local) "$KIND_E2E/cluster" down ;;
  esac
}

deliver_images() {
  local name names archives
  mapfile -t names < <("$KIND_E2E/images" --list)
  case $KUBERNETES_IS in
    given) "$KIND_E2E/images" --push ;;
    kind)
      "$KIND_E2E/images"
      for name in "${names[@]}"; do kind load image-archive "$IMAGES/$name.tar" --name lampyris; done
      ;;
    local)
      "$KIND_E2E/images"
      archives=("${names[@]/#/$IMAGES/}")
      "$KIND_E2E/cluster" load "${archives[@]/%/.tar}"
      ;;
  esac
}

# Where nodes say in which zone they are, no two replicas of a chain share one.
failure_domain() {
  local zone=topology.kubernetes.io/zone
  if kubectl get nodes -o json | jq -e --arg zone $zone 'all(.items[]; .metadata.labels[$zone])' >/dev/null; then
    echo $zone
  else
    echo kubernetes.io/hostname
  fi
}
