"""The xpyd command."""
