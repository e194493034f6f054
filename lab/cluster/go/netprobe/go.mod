module xpyd.dev/e2e/cluster/netprobe

go 1.24.0
