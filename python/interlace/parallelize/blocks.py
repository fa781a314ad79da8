"""Attention blocks as the plan sees them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attention", "Projection"]


@dataclass(frozen=True)
class Projection:
    """A linear that makes heads, by name, and how its rows are ordered (see `cut_heads`)."""

    name: str
    order: str


@dataclass(frozen=True)
class Attention:
    """An attention block: names of its linears, its heads, and what must change with the heads a rank holds.

    `norms` see one head at a time, so their gradients differ between ranks; `biases` are embeddings of one column
    per head, `own` are parameters of the module itself of one value per head. `shared` are the linears that read
    one input. `attributes` and `config` are numbers that the forward reads, of the module and of its config, with
    their kind. `per_head_arguments` hold values for all heads. `only_input`: the one input of all projections,
    when nothing else uses its values.
    """

    name: str
    projections: tuple[Projection, ...]
    output: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    config: tuple[tuple[str, str], ...] = ()
    per_head_arguments: tuple[str, ...] = ()
    only_input: str = ""
