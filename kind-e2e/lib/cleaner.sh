#!/bin/bash
# Runs inside node 1: gives back local volumes whose claim was deleted. usage: cleaner.sh STATE
set -u
state=$1
kubectl="kubectl --kubeconfig=$state/pki/admin.kubeconfig"

while sleep 2; do
  $kubectl get pv -o json 2>/dev/null | jq -r '.items[]
      | select(.status.phase == "Released" and .spec.storageClassName == "local")
      | [.metadata.name, (.metadata.labels | .["lampyris.dev/node"], .["lampyris.dev/disk"])] | @tsv' |
    while IFS=$'\t' read -r volume node disk; do
      folder=$state/$node/kubelet/disks/$disk
      [ -n "$node" ] && [ -n "$disk" ] && [ -d "$folder" ] || continue
      find "$folder" -mindepth 1 -delete
      chown 0:0 "$folder"
      $kubectl patch pv "$volume" --type=json -p '[{"op":"remove","path":"/spec/claimRef"}]'
      echo "wiped $folder"
    done
done
