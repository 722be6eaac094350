"""Parts of the `extract` step: dataset, model facts, sample files, manifest, progress, backends.

Nothing here may import torch, transformers or vllm at module level except the backends, `checkpoint` and `verify`:
bad input has to be refused in a second, not after a 20 s import.
"""
