"""Decoders to measure, whole and split: by interlace, by torch's parallelize_module, by the plan of transformers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import interlace
from interlace.planner.architecture import Architecture

from .cores import Placement, whole_machine

__all__ = [
    "SIZES",
    "Sizes",
    "build",
    "gradients_squared",
    "narrowed",
    "on_one",
    "sizes_of",
    "split_by_plan",
    "split_by_torch",
    "step_of",
]


@dataclass(frozen=True)
class Sizes:
    """What a Llama is made of; layers and vocabulary as far as they are measured."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 1
    vocabulary: int = 64
    tied: bool = False

    @property
    def mlp_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def attention_parameters(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def parameters(self) -> int:
        """Of the products; norms do not count."""
        layers = self.layers * (self.mlp_parameters + self.attention_parameters)
        return layers + (1 if self.tied else 2) * self.vocabulary * self.hidden

    def attention_flops(self, tokens: int) -> int:
        """Of one causal sequence through one layer's scores and sums, half of them masked away."""
        return 2 * tokens * tokens * self.heads * self.head_dim


SIZES = {
    "small": Sizes("small", 1024, 2816, 16, 4, 64),
    "wide": Sizes("wide", 2048, 5632, 16, 4, 128),
}


def sizes_of(name: str, architecture: Architecture) -> Sizes:
    """One layer of a known model. ValueError for layers that are no Llama's: latent attention, experts, no gate."""
    a = architecture
    if a.latent is not None or a.moe is not None or not a.gated:
        raise ValueError(
            f"bench: {name} has layers of another kind (latent attention, experts or no gate); expected a dense model "
            "built like Llama: llama1b, llama8b, llama70b, llama405b, qwen"
        )
    return Sizes(name, a.hidden, a.intermediate, a.heads, a.kv_heads, a.head_dim)


def config_of(sizes: Sizes) -> Any:
    """As transformers wants it."""
    import transformers

    return transformers.LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_dim,
        vocab_size=sizes.vocabulary, max_position_embeddings=32768, tie_word_embeddings=sizes.tied,
    )  # fmt: skip


def build(sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    """Random weights, the same on every rank."""
    import transformers

    torch.manual_seed(0)
    return _quiet(lambda: transformers.LlamaForCausalLM(config_of(sizes)).to(dtype))


def narrowed(sizes: Sizes, ways: int, dtype: torch.dtype) -> nn.Module:
    """A whole model as wide as the first rank's part: its compute without any communication."""
    kv = max(1, -(-sizes.kv_heads // ways))
    heads = kv * (sizes.heads // sizes.kv_heads)
    part = replace(
        sizes, intermediate=-(-sizes.intermediate // ways), heads=heads, kv_heads=kv,
        vocabulary=-(-sizes.vocabulary // ways),
    )  # fmt: skip
    return build(part, dtype)


def split_by_torch(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """What a user of torch writes: its styles on a mesh over gloo; heads or widths that do not divide stay whole."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    own = dist.group.WORLD if group is None else group
    mesh, size = DeviceMesh.from_group(own, "cpu"), dist.get_world_size(own)
    config: Any = model.config
    columns, rows = [], []
    if config.intermediate_size % size == 0:
        columns, rows = ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]
    if config.num_attention_heads % size == config.num_key_value_heads % size == 0:
        columns += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        rows += ["self_attn.o_proj"]
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    # tied ones it would untie, and train another model
    if not config.tie_word_embeddings and config.vocab_size % size == 0:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def split_by_plan(model: nn.Module, scratch: str | None = None) -> nn.Module | str:
    """The model as `from_pretrained(.., tp_plan="auto")` of transformers splits it on gloo, or why that cannot be.

    Collective. The weights travel through a folder that rank 0 writes into `scratch`, which belongs to whoever started
    the ranks: it is cleared even when they are ended.
    """
    config: Any = model.config
    size = dist.get_world_size()
    if config.num_attention_heads % size or config.num_key_value_heads % size:
        return f"{config.num_key_value_heads} key/value heads do not divide by {size}"
    names: list[str | None] = [None]
    with tempfile.TemporaryDirectory(prefix="interlace-bench-", dir=scratch) as folder:
        if dist.get_rank() == 0:
            names = [folder]
            _quiet(lambda: model.save_pretrained(folder))  # type: ignore[operator]
        dist.broadcast_object_list(names, 0)
        found, problem = None, None
        try:
            found = _quiet(partial(_load_by_plan, type(model), str(names[0]), next(model.parameters()).dtype))
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            problem = f"transformers: {error}".splitlines()[0]
        problems: list[str | None] = [None] * size
        dist.all_gather_object(problems, problem)
    said = next((text for text in problems if text), None)
    return said if said is not None or found is None else found


def _load_by_plan(kind: Any, folder: str, dtype: torch.dtype) -> nn.Module:
    from transformers.distributed import DistributedConfig

    how = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model: nn.Module = kind.from_pretrained(folder, dtype=dtype, distributed_config=how)
    return model


def step_of(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """A step of training without the optimizer: the loss of the next token, and all gradients."""

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
            loss.backward()
        return loss.detach()

    return run


def gradients_squared(model: nn.Module, *, ours: bool) -> dict[str, Tensor]:
    """Name -> sum of squares of the whole gradient. Collective where the model is split.

    ours: split by interlace, whose matrices are shards as plain tensors; what torch splits is a DTensor, and knows.
    Weights of keys and values are left out: several ranks may hold the same head.
    """
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        if grad is None or "k_proj" in name or "v_proj" in name:
            continue
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name] = whole.double().square().sum()
        if ours and parameter.dim() > 1:  # norms are whole on every rank
            dist.all_reduce(found[name])
    return found


def on_one(placement: Placement, call: Callable[[], object]) -> Callable[[], object]:
    """`call` on rank 0 with the cores of all ranks, which wait: the unsplit model's turn."""
    if dist.get_rank() != 0:
        return lambda: None

    def run() -> object:
        with whole_machine(placement):
            return call()

    return run


def clone(model: nn.Module, *, trained: bool) -> nn.Module:
    """A copy of its own weights, with gradients or frozen."""
    return copy.deepcopy(model).requires_grad_(trained).train(trained)


@contextmanager
def _silent() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _quiet(call: Callable[[], Any]) -> Any:
    with _silent():
        return call()


def split_by_interlace(model: nn.Module, group: Any = None) -> nn.Module:
    """In place, as a user calls it."""
    return interlace.parallelize(model, group)


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16."""
    return str(dtype).removeprefix("torch.")
