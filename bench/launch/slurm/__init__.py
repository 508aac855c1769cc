"""Launch on a SLURM cluster through submitit: job arrays, one per resource shape, one task per GPU."""
