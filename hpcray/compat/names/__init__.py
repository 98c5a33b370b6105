"""Names of Ray that hpcray itself has no use for: small versions of our own, one module per module of Ray."""
