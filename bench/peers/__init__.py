"""`python -m bench peers`: the same job, the same host, the same faults, for orch and for what people use instead."""
