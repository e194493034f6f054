"""What a plan looks like in Kubernetes and as local processes. Pure."""
