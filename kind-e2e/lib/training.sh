# Datasets and training jobs of the demo and the tests, in namespace train. Sourced after common.sh and s3.sh.

training_namespace() {
  kubectl apply -f - >/dev/null <<'Y'
apiVersion: v1
kind: Namespace
metadata: {name: train, labels: {pod-security.kubernetes.io/enforce: restricted}}
Y
  s3_keys train
}

# training_datasets NAME FOLDER: its objects, its Dataset, a Dataset for its copy, and the load between them.
training_datasets() {
  with_forward s3_put "$2" "$1"
  # A load runs once: to copy again takes a new one. Its Job must be gone first, or its result would be taken for ours.
  kubectl -n train delete datasetload "$1" --ignore-not-found >/dev/null
  kubectl -n train delete job "$1-load" --ignore-not-found >/dev/null
  training_dataset "$1" "$S3_BUCKET" s3-keys
  sed "s|@NAME@|$1|g" "$KIND_E2E/manifests/copy.yaml" | kubectl apply -f - >/dev/null
}

# training_dataset NAME BUCKET SECRET: one Dataset on S3.
training_dataset() {
  kubectl apply -f - >/dev/null <<Y
apiVersion: lampyris.dev/v1alpha1
kind: Dataset
metadata: {name: "$1", namespace: train}
spec:
  format: Vortex
  source:
    s3:
      uri: "s3://$2/$1"
      endpoint: https://s3.s3.svc
      pathStyle: true
      caBundle: "$(s3_ca)"
      secretRef: {name: "$3"}
Y
}

# training_pod POD COMMAND NAME...: a pod that runs the command, a JSON array, with Datasets NAME at /data/NAME.
training_pod() {
  local pod=$1 command=$2 name mentions=()
  shift 2
  for name in "$@"; do mentions+=("$name:/data/$name"); done
  kubectl -n train delete pod "$pod" --ignore-not-found >/dev/null
  sed -e "s|@POD@|$pod|g" -e "s|@DATASETS@|$(IFS=, && echo "${mentions[*]}")|" -e "s|@COMMAND@|$command|" \
    -e "s|@IMAGE@|${LAMPYRIS_REGISTRY:-lampyris.local}/train:$(workspace_version)|" \
    "$KIND_E2E/manifests/train-pod.yaml" | kubectl apply -f - >/dev/null
}

# training_job POD NAME=FOLDER...: reads each Dataset NAME, which holds the files of FOLDER, and prints what it found.
training_job() {
  local pod=$1 pair name sets=() names=() files=() command
  shift
  for pair in "$@"; do
    name=${pair%%=*}
    sets+=("$name=/data/$name") names+=("$name") files+=("--from-file=$name.json=${pair#*=}/digests.json")
  done
  kubectl -n train create configmap "train-$pod" --from-file="$KIND_E2E/train/read.py" "${files[@]}" \
    --dry-run=client -o yaml | kubectl apply -f - >/dev/null
  command=$(jq -cn '$ARGS.positional' --args -- /usr/bin/python3 /job/read.py --expect /job "${sets[@]}")
  training_pod "$pod" "$command" "${names[@]}"
  wait_for 120 "the training pod's start" training_started "$pod"
  kubectl -n train logs -f "$pod" -c train
  wait_for 20 "the training pod's end" training_ended "$pod"
  [ "$(training_ended "$pod")" = 0 ]
}

training_started() {
  kubectl -n train get pod "$1" -o jsonpath='{.status.containerStatuses[0].state}' | grep -E 'running|terminated'
}

training_ended() { # prints the exit status of what the pod ran
  kubectl -n train get pod "$1" -o jsonpath='{.status.containerStatuses[0].state.terminated.exitCode}' | grep .
}
