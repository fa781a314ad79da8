"""Puts our styles under the stock names of transformers, and takes them away again.

The stock names, and not new ones: adapters of PEFT and head counts of caches are decided by the name of a style, and
an unknown one silently trains an unsplit adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..context_parallel import ContextAttention, replace_attention
from ..groups import Group

__all__ = ["Enabled", "disable", "enable"]

OLDEST = "5.17"  # of transformers: the first with styles of the present form


@dataclass(frozen=True)
class Enabled:
    """What `enable` did: `ours` are the style names that run on interlace, `stock` the others, with the reason.

    As a context manager it calls `disable` at the end.
    """

    ours: tuple[str, ...]
    stock: Mapping[str, str]

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _enabled:
            disable()

    def __str__(self) -> str:
        lines = [f"{name:<30} interlace" for name in self.ours]
        return "\n".join(lines + [f"{name:<30} stock: {reason}" for name, reason in self.stock.items()])


_enabled: list[Enabled] = []
_before: dict[str, Any] = {}  # local overrides that were there before ours
_restore_attention: list[Callable[[], None]] = []


def _registry() -> Any:
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError as error:
        raise ImportError(
            f"interlace.hf: needs transformers >= {OLDEST} with its tensor parallel styles ({error}); "
            "pip install -U transformers"
        ) from None
    return ALL_PARALLEL_STYLES


def enable(
    *, context_parallel: Group | DeviceMesh = None, algorithm: str | None = None, layout: str = "zigzag"
) -> Enabled:
    """Make the tensor parallel styles of transformers run on interlace, for models that are split from now on.

    Then `AutoModelForCausalLM.from_pretrained(path, tp_plan="auto")` under torchrun, as always: plan, loading, saving,
    PEFT and generate are those of transformers, products with their collectives are ours. Process-wide; undone by
    `disable()`, or by leaving `with enable():`. Models split before keep their kernels. What is not ours stays stock:
    names in `Enabled.stock`, single modules in `interlace.hf.report(model)`, with a warning when it happens.

    context_parallel: a mesh, for example mesh["cp"], whose ranks each hold a part of the sequence; attention of every
    model then spans them. Deal batches out with `interlace.context_parallel.shard_batch` in the same `layout` and call
    models with its inputs and use_cache=False. algorithm: "ring" (default), "all_gather" or "all_to_all"; over a mesh
    of two axes "hierarchical".

    Raises ImportError without transformers >= 5.17, ValueError when it is enabled already or the algorithm does not
    fit the mesh.
    """
    if _enabled:
        raise ValueError("interlace.hf.enable: enabled already; call interlace.hf.disable() first")
    registry = _registry()
    if context_parallel is not None:
        two_axes = isinstance(context_parallel, DeviceMesh) and context_parallel.ndim == 2
        chosen = algorithm or ("hierarchical" if two_axes else "ring")
        _restore_attention.append(replace_attention(ContextAttention(context_parallel, chosen, layout)))
    from .styles import NOTHING_TO_FUSE, ours_for

    ours, stock = [], {}
    for name in list(registry):
        style = ours_for(registry[name])
        if style is None:
            stock[name] = NOTHING_TO_FUSE.get(
                name, f"style {type(registry[name]).__name__} is not known here"
            )
            continue
        if name in registry._local_mapping:
            _before[name] = registry._local_mapping[name]
        registry[name] = style
        ours.append(name)
    _enabled.append(Enabled(tuple(ours), stock))
    return _enabled[0]


def disable() -> None:
    """Give the stock names their stock styles back. Models that were split meanwhile keep running on interlace.

    Raises ValueError when nothing is enabled.
    """
    if not _enabled:
        raise ValueError("interlace.hf.disable: not enabled; call interlace.hf.enable() first")
    registry = _registry()
    while _restore_attention:
        _restore_attention.pop()()
    for name in _enabled.pop().ours:
        if name in _before:
            registry[name] = _before.pop(name)
        elif name in registry._local_mapping:
            del registry[name]
