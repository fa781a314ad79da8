"""Frozen weights in the tile engine's layout: one copy, not two.

A packed weight is a tensor subclass that looks like the plain [N, K] weight to everything but our ops, which take
its panels as they are. Any other use unpacks it; writing to it (an optimizer, load_state_dict, `weight.data +=`)
packs the result again. So there is no second copy that could go stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .errors import translated  # (its import loads the op library)

__all__ = ["PackedWeight", "pack_weights", "packed_bytes", "unpack_weights"]

_OPS = torch.ops.interlace
_live: weakref.WeakSet[Any] = weakref.WeakSet()
_SHARES_PANELS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
Model = TypeVar("Model", bound=nn.Module)


class _Panels:
    """Owns the packed bytes, so that aliases of a weight are counted once."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        _live.add(self)


class PackedWeight(Tensor):
    """A frozen weight [N, K] kept as panels of 64 columns. Made by `pack_weights`; requires_grad is False."""

    panels: Tensor

    @staticmethod
    def __new__(cls, panels: Tensor, rows: int, depth: int, dtype: torch.dtype, owner: _Panels | None = None):
        return Tensor._make_wrapper_subclass(cls, (rows, depth), dtype=dtype, device=panels.device)

    def __init__(
        self, panels: Tensor, rows: int, depth: int, dtype: torch.dtype, owner: _Panels | None = None
    ) -> None:
        self.panels = panels
        self._owner = owner if owner is not None else _Panels(panels)

    @classmethod
    def pack(cls, weight: Tensor) -> PackedWeight:
        """Pack a plain weight [N, K] of any strides. TypeError when no tile kernel takes its dtype here."""
        plain = weight.detach()
        try:
            panels = _OPS.pack_weight(plain)
        except RuntimeError as error:
            raise translated(error) from None
        return cls(panels, plain.shape[0], plain.shape[1], plain.dtype)

    def unpack(self) -> Tensor:
        """The plain weight [N, K], a copy; bit for bit what was packed."""
        return _OPS.unpack_weight(self.panels, self.shape[0], self.shape[1]).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, int, torch.dtype]]:
        return ["panels"], (self.shape[0], self.shape[1], self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> PackedWeight:
        return PackedWeight(inner["panels"], *context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={list(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.unpack().__reduce_ex__(protocol)  # files and other processes get the plain weight

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _SHARES_PANELS and isinstance(first, PackedWeight):
            return cls(first.panels, first.shape[0], first.shape[1], first.dtype, first._owner)
        if func is torch.ops.aten.clone.default and isinstance(first, PackedWeight):
            return cls(first.panels.clone(), first.shape[0], first.shape[1], first.dtype)
        plain: list[tuple[PackedWeight, Tensor]] = []

        def unpacked(value: Any) -> Any:
            if not isinstance(value, PackedWeight):
                return value
            plain.append((value, value.unpack()))
            return plain[-1][1]

        result = func(*tree_map(unpacked, args), **tree_map(unpacked, kwargs))
        if not func._schema.is_mutable:
            return result
        for weight, values in plain:
            weight.panels.copy_(_OPS.pack_weight(values))
        by_value = {id(values): weight for weight, values in plain}
        return tree_map(lambda value: by_value.get(id(value), value), result)


def packed_bytes() -> int:
    """Bytes of all packed weights alive in this process."""
    return sum(panels.data.nbytes for panels in _live)


def _plain_in_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    weight = state.get(prefix + "weight")
    if isinstance(weight, PackedWeight):
        state[prefix + "weight"] = weight.unpack()


def _can_pack(weight: Tensor | None) -> bool:
    if (
        weight is None
        or weight.requires_grad
        or weight.device.type != "cpu"
        or isinstance(weight, PackedWeight)
    ):
        return False
    _, float32_tiles, bfloat16_tiles, _ = _OPS.engine_info()
    # fp16 is multiplied as fp32: packing would double it
    return (weight.dtype is torch.float32 and float32_tiles) or (
        weight.dtype is torch.bfloat16 and bfloat16_tiles
    )


def _replace(model: nn.Module, wanted: Callable[[nn.Module], bool], make: Callable[[Tensor], Tensor]) -> None:
    for module in model.modules():
        if not wanted(module):
            continue
        module.weight = nn.Parameter(make(module.weight), requires_grad=False)


def pack_weights(model: Model) -> Model:
    """Put the frozen weights of the model's parallel layers into the tile engine's layout, in place of plain ones.

    Worth it for inference and for the frozen base under adapters: decode streams a packed weight up to twice as fast.
    Touches parallel layers (modules with `packs_weight = True`) whose weight does not require gradients, is fp32 or
    bf16, on the CPU, and belongs to one module only; the rest stays as it is. `state_dict` still holds plain weights.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    def wanted(module: nn.Module) -> bool:
        if not getattr(module, "packs_weight", False):
            return False
        return _can_pack(module.weight) and owners[id(module.weight)] == 1

    _replace(model, wanted, PackedWeight.pack)
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), PackedWeight) and not hasattr(module, "_packed_hook"):
            module._packed_hook = True
            module.register_state_dict_post_hook(_plain_in_state_dict)
    return model


def unpack_weights(model: Model) -> Model:
    """The inverse of `pack_weights`: plain weights everywhere, for training them."""
    _replace(
        model,
        lambda module: isinstance(getattr(module, "weight", None), PackedWeight),
        lambda weight: weight.unpack(),
    )
    return model
