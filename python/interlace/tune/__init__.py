"""`interlace tune`: measures the ways a call on CUDA tensors can take and writes which is fastest where."""
