"""A real Slurm of several nodes on one Linux machine, for tests: `python slurm/testcluster up 4` (README.md)."""
