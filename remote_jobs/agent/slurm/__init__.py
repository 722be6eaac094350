"""Jobs on a Slurm cluster: the agent (on the login node) submits, asks and cancels; the supervisor runs in the allocation.

The supervisor is the same as on a direct host and the job directory, on the shared file system, is the same truth.
Here lies only what Slurm adds: a batch script, the queue, and what Slurm says of a job that ended without a word.
"""
