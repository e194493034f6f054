#!/bin/sh
# Take the operator and its CRDs out of the cluster that kubectl talks to. Refused while there are services, which would go
# with the CRDs; --all takes them along. OVERLAY names what was installed, KUBECTL another kubectl.
set -eu
cd "$(dirname "$0")/.."
left=$(${KUBECTL:-kubectl} get disaggservices.xpyd.dev -A -o name --ignore-not-found 2>/dev/null || true)
if [ -n "$left" ] && [ "${1:-}" != --all ]; then
    echo "still there, delete them first or say --all:" >&2
    echo "$left" >&2
    exit 1
fi
exec ${KUBECTL:-kubectl} delete --ignore-not-found -k "${OVERLAY:-manifests/base}"
