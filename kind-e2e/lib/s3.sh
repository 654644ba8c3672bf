# The S3 server of tests and demo, in namespace s3. Keys and certificates are in Secrets there, nowhere else.
# Sourced after common.sh.

S3_BUCKET=train

s3_secret() { kubectl -n s3 get secret "$1" -o "jsonpath={.data.$2}"; }
s3_ca() { s3_secret tls ca\\.crt; }

s3_certificate() { # in the current folder: a CA, and a certificate for the Service and for a forwarded port
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=s3-ca \
    -keyout ca.key -out ca.crt 2>/dev/null
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=s3 -keyout tls.key -out tls.csr 2>/dev/null
  openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out tls.crt -extfile <(
    echo "subjectAltName=DNS:s3.s3.svc,DNS:s3.s3.svc.cluster.local,DNS:localhost,IP:127.0.0.1"
  ) 2>/dev/null
}

s3_secrets() {
  local folder
  kubectl -n s3 get secret tls root >/dev/null 2>&1 && return
  folder=$(mktemp -d)
  (cd "$folder" && s3_certificate)
  kubectl -n s3 create secret generic tls --from-file="$folder/ca.crt" --from-file="$folder/tls.crt" \
    --from-file="$folder/tls.key"
  kubectl -n s3 create secret generic root --from-literal=accessKeyId="demo-$(openssl rand -hex 4)" \
    --from-literal=secretAccessKey="$(openssl rand -hex 20)"
  rm -rf "$folder"
}

s3_up() {
  local registry=${LAMPYRIS_REGISTRY:-lampyris.local}
  kubectl create namespace s3 --dry-run=client -o yaml | kubectl apply -f - >/dev/null
  s3_secrets >/dev/null
  sed "s|@IMAGE@|$registry/s3:$(workspace_version)|" "$KIND_E2E/manifests/s3.yaml" | kubectl apply -f - >/dev/null
  kubectl -n s3 rollout status deployment/s3 --timeout=90s >/dev/null
  with_forward s3_bucket $S3_BUCKET
}

s3_keys() {
  local id secret
  id=$(s3_secret root accessKeyId) secret=$(s3_secret root secretAccessKey)
  printf '{"apiVersion":"v1","kind":"Secret","metadata":{"name":"s3-keys","namespace":"%s"},"data":{%s}}' "$1" \
    "\"accessKeyId\":\"$id\",\"secretAccessKey\":\"$secret\"" | kubectl apply -f - >/dev/null
}

# with_forward COMMAND...: runs it while $S3_PORT leads to the server. A subshell: however it ends, the forward ends.
with_forward() (
  S3_FILES=$(mktemp -d)
  kubectl -n s3 port-forward deployment/s3 :7070 >"$S3_FILES/out" 2>&1 &
  forward=$!
  trap 'kill $forward 2>/dev/null || true; rm -rf "$S3_FILES"' EXIT
  s3_secret tls ca\\.crt | base64 -d >"$S3_FILES/ca.crt"
  S3_USER="$(s3_secret root accessKeyId | base64 -d):$(s3_secret root secretAccessKey | base64 -d)"
  wait_for 20 "forwarding a port to the S3 server" grep -q '^Forwarding from 127' "$S3_FILES/out"
  S3_PORT=$(sed -n 's/^Forwarding from 127.0.0.1:\([0-9]*\).*/\1/p' "$S3_FILES/out")
  "$@"
)

# s3_request BUCKET/KEY PAYLOAD-SHA256 CURL-FLAGS...; the key pair goes in by a file, not by an argument.
s3_request() {
  local path=$1 payload=$2
  shift 2
  curl -sS --fail-with-body --cacert "$S3_FILES/ca.crt" --aws-sigv4 aws:amz:us-east-1:s3 \
    -H "x-amz-content-sha256: $payload" -K <(printf 'user = "%s"\n' "$S3_USER") "$@" "https://localhost:$S3_PORT/$path"
}

s3_status() { # s3_status METHOD BUCKET/KEY: the HTTP status
  s3_request "$2" UNSIGNED-PAYLOAD -X "$1" -o /dev/null -w '%{http_code}' 2>/dev/null || true
}

s3_bucket() {
  local status
  status=$(s3_status PUT "$1")
  case $status in 200 | 409) ;; *) die "making bucket $1: HTTP status $status" ;; esac
}

s3_remove() { # s3_remove KEY... BUCKET
  local bucket=${*: -1} key status
  for key in "${@:1:$#-1}" ""; do
    status=$(s3_status DELETE "$bucket${key:+/$key}")
    case $status in 204 | 404) ;; *) die "removing $bucket/$key: HTTP status $status" ;; esac
  done
}

s3_put() { # s3_put FOLDER PREFIX [BUCKET] | FILE KEY [BUCKET]
  local file
  if [ -d "$1" ]; then
    for file in "$1"/*.vortex; do s3_put "$file" "$2/$(basename "$file")" "${3:-$S3_BUCKET}"; done
    return
  fi
  s3_request "${3:-$S3_BUCKET}/$2" "$(sha256sum "$1" | cut -d' ' -f1)" -T "$1"
}
