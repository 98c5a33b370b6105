"""Shared by tests: running whole jobs, and finding what they left behind."""
