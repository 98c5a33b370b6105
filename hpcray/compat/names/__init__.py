"""Names of Ray that hpcray itself has no use for: one file for each module of Ray, or for what belongs together."""
