#!/usr/bin/env bash
# Applies a stage's file, and before it what the stages share, and follows it to its end:
#     follow.sh FILE rayjob|jobset NAME [SHARED]
set -euo pipefail
file=$1 kind=$2 name=$3
case $kind in
    rayjob) job=job/$name path='{.status.jobDeploymentStatus}' ;;
    jobset) job=job/$name-pods-0 path='{.status.terminalState}' ;;
esac
state() { kubectl get "$kind" "$name" --ignore-not-found --output="jsonpath=$path"; }
if [ -n "$(kubectl get "$kind" "$name" --ignore-not-found --output=name)" ] && [[ $(state) != @(Complete|Completed|Failed) ]]; then
    echo "$name runs already"
else
    if [ -n "${4:-}" ]; then kubectl apply --filename="$4"; fi
    kubectl delete --ignore-not-found --filename="$file" # one that has ended cannot be started again
    kubectl apply --filename="$file"
fi
(until kubectl logs --follow "$job" 2>/dev/null; do sleep "${EVERY:-5}"; done) &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
while true; do
    case $(state) in
        Complete | Completed) break ;;
        Failed) exit 1 ;;
    esac
    sleep "${EVERY:-5}"
done
sleep "${EVERY:-5}" # for the last lines
