"""Observing and applying with processes of this host."""
