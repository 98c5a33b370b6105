"""The launch: the mpirun or srun line of a job, composed and run."""
