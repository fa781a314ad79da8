"""Checkpoints of split models under the names, shapes and dtypes of the unsplit one: whole, or through torch's DCP."""

from .distributed import distributed_state_dict
from .full import full_grads, full_state_dict
from .load import load_full_state_dict
from .meta import materialise
from .save import save_full

__all__ = [
    "distributed_state_dict",
    "full_grads",
    "full_state_dict",
    "load_full_state_dict",
    "materialise",
    "save_full",
]
