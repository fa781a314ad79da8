"""What needs a GPU: correctness by virtual ranks, the protocol under stress, several GPUs, sanitizer, timings.

`make test-gpu` runs `suite.py`; every part can be run alone and writes into one JSON. `rehearsal.py` stands in for the
kernels on a machine without a GPU, so that the parts themselves are tested everywhere.
"""
