#!/bin/sh
# Take the operator and its CRDs out of the cluster that kubectl talks to. Refused while there are services, which would go
# with the CRDs, and where it cannot be told whether there are; --all takes them along. OVERLAY names what was installed,
# KUBECTL another kubectl.
set -eu
cd "$(dirname "$0")/.."
kubectl=${KUBECTL:-kubectl}
if [ "${1:-}" != --all ]; then
    known=$($kubectl get customresourcedefinitions disaggservices.xpyd.dev -o name --ignore-not-found)
    left=$([ -z "$known" ] || $kubectl get disaggservices.xpyd.dev -A -o name)
    if [ -n "$left" ]; then
        echo "still there, delete them first or say --all:" >&2
        echo "$left" >&2
        exit 1
    fi
fi
exec $kubectl delete --ignore-not-found -k "${OVERLAY:-manifests/base}"
