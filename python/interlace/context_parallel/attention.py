"""The algorithm of context-parallel attention by name, with the group it runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..functional.attention import (
    LAYOUTS,
    all_gather_attention,
    all_to_all_attention,
    hierarchical_attention,
    ring_attention,
)
from ..groups import Group, resolve

__all__ = ["ALGORITHMS", "ContextAttention", "whole_group"]

ALGORITHMS = {
    "ring": ring_attention,
    "all_gather": all_gather_attention,
    "all_to_all": all_to_all_attention,
}


def whole_group(mesh: Group) -> Group:
    """The group of all ranks of a mesh of one axis or two; ValueError for two axes without names."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError("context parallel: a mesh of two axes needs mesh_dim_names")
    return mesh._flatten()


@dataclass(frozen=True)
class ContextAttention:
    """Which ranks hold the sequence, in which layout, and how keys and values get to queries.

    algorithm: "ring", "all_gather" or "all_to_all" over a group of one axis; over a mesh of two axes (ring,
    all-to-all) it is "hierarchical".
    """

    mesh: Group
    algorithm: str = "ring"
    layout: str = "zigzag"

    def __post_init__(self) -> None:
        two_axes = isinstance(self.mesh, DeviceMesh) and self.mesh.ndim == 2
        names = ("hierarchical",) if two_axes else tuple(ALGORITHMS)
        if self.algorithm not in names:
            raise ValueError(
                f"context parallel: algorithm={self.algorithm!r} over a mesh of {2 if two_axes else 1} axes; "
                f"expected one of {', '.join(names)}"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"context parallel: layout={self.layout!r}; expected one of {', '.join(LAYOUTS)}"
            )

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Which shard of the sequence this rank holds, of how many."""
        if self.algorithm != "hierarchical":
            info = resolve(self.mesh)
            return info.rank, info.world_size
        assert isinstance(self.mesh, DeviceMesh)  # __post_init__ saw to it
        ring, inner = resolve(self.mesh.get_group(0)), resolve(self.mesh.get_group(1))
        return ring.rank * inner.world_size + inner.rank, ring.world_size * inner.world_size

    @property
    def whole_group(self) -> Group:
        """The group of all ranks that hold the sequence."""
        return whole_group(self.mesh)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        window: int | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """q [B, Hq, S/R, D], k, v [B, Hkv, S/R, D] -> [B, Hq, S/R, D]."""
        options = {
            "causal": causal, "scale": scale, "layout": self.layout, "window": window, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        if self.algorithm == "hierarchical":
            assert isinstance(self.mesh, DeviceMesh)
            out = hierarchical_attention(q, k, v, mesh=self.mesh, **options)
        else:
            out = ALGORITHMS[self.algorithm](q, k, v, group=self.mesh, **options)
        assert isinstance(out, Tensor)
        return out
