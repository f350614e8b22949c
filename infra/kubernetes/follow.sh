#!/usr/bin/env bash
# Applies a stage's file, and before it what the stages share, and follows it to its end:
#     follow.sh FILE rayjob|jobset NAME [SHARED]
set -euo pipefail
file=$1 kind=$2 name=$3
case $kind in # a Ray job that somebody stopped has a deployment that is complete
    rayjob) job=job/$name path='{.status.jobDeploymentStatus}/{.status.jobStatus}' ;;
    jobset) job=job/$name-pods-0 path='{.status.terminalState}' ;;
esac
there() { [ -n "$(kubectl get "$kind" "$name" --ignore-not-found --output=name)" ]; }
state() { kubectl get "$kind" "$name" --ignore-not-found --output="jsonpath=$path"; }
ended() { [[ $1 == @(Complete/*|Completed|Failed|Failed/*|ValidationFailed/*) ]]; }

if there && ! ended "$(state)"; then
    echo "$name runs already"
else
    if [ -n "${4:-}" ]; then kubectl apply --filename="$4"; fi
    kubectl delete --ignore-not-found --filename="$file" # one that has ended cannot be started again
    kubectl apply --filename="$file"
fi
# Again and again: a connection breaks, and pods that fail are started anew.
(while sleep "${EVERY:-5}"; do kubectl logs --follow --since="${EVERY:-5}s" "$job" 2>/dev/null || true; done) &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
until ended "$(state)"; do
    there || { echo "$name is gone: somebody deleted it" >&2 && exit 1; }
    sleep "${EVERY:-5}"
done
sleep "$((2 * ${EVERY:-5}))" # for the last lines
case $(state) in
    Complete/SUCCEEDED | Completed) ;;
    *) echo "$name ended as $(state)" >&2 && exit 1 ;;
esac
