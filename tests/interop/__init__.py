"""Parallel layers and split models under the rest of PyTorch: compilers, wrappers, schedules, adapters."""
