"""Observing and applying through the Kubernetes API."""
