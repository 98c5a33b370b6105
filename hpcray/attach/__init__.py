"""Drivers outside of their job: on a login node, on a laptop. See docs/explain/attach.md."""
