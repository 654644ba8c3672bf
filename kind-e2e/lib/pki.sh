# Certificates and kubeconfigs of the local cluster: one CA, made anew at every start. Sourced after node.sh.

issue() { # issue NAME SUBJECT [SUBJECT ALT NAMES]
  local name=$1 subject=$2 names=${3:-}
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "$subject" \
    -keyout "$name.key" -out "$name.csr" 2>/dev/null
  openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out "$name.crt" \
    -extfile <(
      echo extendedKeyUsage=serverAuth,clientAuth
      [ -z "$names" ] || echo "subjectAltName=$names"
    ) 2>/dev/null
}

kubeconfig() { # kubeconfig USER SERVER OUT
  jq -n --arg user "$1" --arg server "$2" --arg ca "$(base64 -w0 ca.crt)" \
    --arg cert "$(base64 -w0 "$1.crt")" --arg key "$(base64 -w0 "$1.key")" '{
      apiVersion: "v1", kind: "Config", "current-context": "lampyris",
      clusters: [{name: "lampyris", cluster: {server: $server, "certificate-authority-data": $ca}}],
      users: [{name: $user, user: {"client-certificate-data": $cert, "client-key-data": $key}}],
      contexts: [{name: "lampyris", context: {cluster: "lampyris", user: $user}}]}' >"$3"
}

make_pki() {
  local i user names="DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
  names+=",DNS:kubernetes.default.svc.cluster.local,DNS:localhost,IP:$SERVICE_NET.0.1,IP:$NODE_NET.1,IP:127.0.0.1"
  mkdir -p "$STATE/pki"
  cd "$STATE/pki"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=lampyris-local-ca \
    -keyout ca.key -out ca.crt 2>/dev/null
  openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out sa.key 2>/dev/null
  openssl pkey -in sa.key -pubout -out sa.pub
  issue apiserver /CN=kube-apiserver "$names"
  issue admin /O=system:masters/CN=admin
  issue kubelet-client /O=system:masters/CN=apiserver-kubelet-client
  issue front-proxy /CN=front-proxy
  for user in controller-manager scheduler proxy; do
    issue $user /CN=system:kube-$user
    kubeconfig $user "$API" $user.kubeconfig
  done
  for i in $(node_numbers); do
    issue "node-$i" "/O=system:nodes/CN=system:node:node-$i" "DNS:node-$i,IP:$NODE_NET.$i"
    kubeconfig "node-$i" "$API" "node-$i.kubeconfig"
  done
  kubeconfig admin "$API" admin.kubeconfig
  kubeconfig admin "https://127.0.0.1:$API_PORT" "$KUBECONFIG_OUT"
  cd - >/dev/null
}
