"""The ops against the unsharded fp64 oracle, on one to four processes."""
