"""The public ops on CUDA tensors: arguments are checked, an algorithm is chosen, and the call goes that way.

What is chosen is decided by `heuristics` from what all ranks know alike; a group agrees on its hardware and its tuned
table once, at its first call. `interlace.last_path()` says what a call took and why.
"""

from .deciding import OURS, foreseen
from .kernels import KERNELS
from .state import GroupState, forget, is_used, known, state_of

__all__ = ["KERNELS", "OURS", "GroupState", "foreseen", "forget", "is_used", "known", "state_of"]
