"""The base of every module that holds a part of its parameters: it is known to what counts them, and checks what
is loaded into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .clipping import install_total_norm, split_modules
from .layout import ParameterLayout

__all__ = ["SplitModule"]

_HELD = "held"  # in the metadata of a state dict: what the saved shards are


class SplitModule(nn.Module):
    """A module whose own parameters are this rank's shards; a subclass says of which wholes.

    However an instance comes to be (constructor, deepcopy, unpickling), norms of gradients count its parameters
    once over the group; the first one makes torch.nn.utils.clip_grad_norm_ do so. `load_state_dict` takes what
    `state_dict` of this rank gave and refuses whole parameters and shards of other ranks.
    """

    rank: int

    def __new__(cls, *_args: Any, **_kwargs: Any) -> SplitModule:
        module = super().__new__(cls)
        split_modules.add(module)
        install_total_norm()
        return module

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """Layout of every own parameter that is cut."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its parameters are cut")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.setdefault(prefix[:-1], {})[_HELD] = {
                name: _held(layout, self.rank) for name, layout in self.parameter_layouts().items()
            }

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = local_metadata.get(_HELD, {})
        problems: dict[str, str] = {}
        for name, layout in self.parameter_layouts().items():
            key = prefix + name
            value = state_dict.get(key)
            if isinstance(value, Tensor):
                problem = _problem(tuple(value.shape), layout, self.rank, saved.get(name))
                if problem:
                    problems[key] = f"{key}: {problem}"
        if problems:  # nothing of a wrong shard is copied
            state_dict = {key: value for key, value in state_dict.items() if key not in problems}
        missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        missing_keys += [key for key in missing if key not in problems]
        error_msgs += problems.values()


def _held(layout: ParameterLayout, rank: int) -> tuple[Any, ...]:
    return layout.shape, layout.dim, layout.ranges(rank)


def _problem(shape: tuple[int, ...], layout: ParameterLayout, rank: int, saved: Any) -> str:
    """Why a tensor of this shape, saved with these words about it, is not the shard of `rank`; "" when it is."""
    want = layout.local_shape(rank)
    if shape == want and saved in (None, _held(layout, rank)):
        return ""
    if shape == layout.shape and shape != want:
        return (
            f"got the whole parameter {list(shape)}, expected this rank's shard {list(want)}; "
            "use interlace.load_full_state_dict for a whole checkpoint"
        )
    held = f"slices {saved[2]} of dim {saved[1]}" if saved else f"a shard {list(shape)}"
    return (
        f"got {held}, expected slices {layout.ranges(rank)} of dim {layout.dim} (shape {list(want)}): the state "
        "dict is another rank's or another world size's; save with interlace.full_state_dict or "
        "interlace.checkpoint.distributed_state_dict to load it in another split"
    )
