"""Whole models split over processes: a step of training (forward and backward), loading, and what a module call costs.

step: `interlace.parallelize` against torch's `parallelize_module` with its own styles on gloo, the same weights; a
decoder of 2 layers, hidden 2048, and SmolLM2-135M with its real weights, whose 3 key/value heads torch cannot split
over 2 ranks: there its attention stays whole. load: a checkpoint of SmolLM2 into shards (built on meta) against
`from_pretrained`, until every weight was read once: the latter maps the file and reads it later. call: a module
against the op under it, one row, no gradients; ms is the difference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import interlace
from interlace.bench.harness import Column, Session, command
from interlace.pretrained.models import Source, load, prepare

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 16, 4, 8192
CACHE = Path.home() / ".cache" / "interlace"
CALLS = 100  # module calls in one timed run

COLUMNS = [
    Column("what", "what", width=6),
    Column("model", "model", width=16),
    Column("dtype", "dtype"),
    Column("tokens", "tokens", width=7),
    Column("ms", "ms", "{:.3f}"),
    Column("p95", "p95_ms", "{:.3f}"),
    Column("baseline", "baseline", width=24),
    Column("its ms", "baseline_ms", "{:.3f}"),
    Column("x baseline", "ratio", "{:.2f}", width=11),
]


def decoder(dtype: torch.dtype) -> nn.Module:
    """Llama's architecture, 2 layers, random weights, the same on every rank."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
    return model.train()


def split_by_torch(model: nn.Module, world_size: int) -> nn.Module:
    """What a user of torch writes: its styles on a mesh over gloo; attention only where the heads divide."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh("cpu", list(range(world_size)))
    config: Any = model.config
    columns, rows = ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]
    if config.num_attention_heads % world_size == config.num_key_value_heads % world_size == 0:
        columns += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        rows += ["self_attn.o_proj"]
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    if not config.tie_word_embeddings:  # it would untie them, and train another model
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


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


def steps(session: Session, name: str, whole: nn.Module, tokens: tuple[int, ...]) -> None:
    """Check and time both splits of one model; the unsplit one says what loss and gradients are right."""
    dtype = next(whole.parameters()).dtype
    vocabulary = int(whole.get_input_embeddings().weight.shape[0])  # type: ignore[operator,union-attr]
    probe = torch.randint(0, vocabulary, (1, 32), generator=torch.Generator().manual_seed(1))
    loss = step_of(whole, probe)()
    norms = {
        n: p.grad.clone()
        for n, p in whole.named_parameters()
        if n.endswith("norm.weight") and p.grad is not None
    }
    whole.zero_grad(set_to_none=True)
    models = {
        "torch": split_by_torch(copy.deepcopy(whole), session.world_size),
        "interlace": interlace.parallelize(whole, None),
    }
    limit = 1e-4 if dtype is torch.float32 else 5e-2  # a stack of layers rounds more than a product does
    for variant, model in models.items():
        session.check(f"{name} {variant} loss", step_of(model, probe)(), loss, limit)
        found = dict(model.named_parameters())
        for norm in (min(norms), max(norms)):
            session.check(f"{name} {variant} {norm}", _plain(found[norm].grad), norms[norm], limit)
    for count in tokens:
        ids = torch.randint(0, vocabulary, (1, count), generator=torch.Generator().manual_seed(2))
        timings = session.time({n: step_of(m, ids) for n, m in models.items()}, budget_seconds=20.0)
        add(session, "step", name, dtype, count, timings, "interlace", "torch", "parallelize_module, gloo")


def _plain(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def add(
    session: Session,
    what: str,
    model: str,
    dtype: torch.dtype,
    tokens: int | None,
    timings: Any,
    ours: str,
    theirs: str,
    baseline: str,
) -> None:
    """A line of the table from one interleaved run."""
    mine = timings.summary(ours)
    session.add(
        what=what,
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        tokens=tokens,
        ms=mine.median * 1e3,
        p95_ms=mine.p95 * 1e3,
        baseline=baseline,
        baseline_ms=timings.summary(theirs).median * 1e3,
        ratio=timings.ratio(theirs, ours),
        kept=mine.kept,
        taken=mine.taken,
    )


def loading(session: Session, source: Source, dtype: torch.dtype) -> None:
    """From a folder of safetensors to a model that is ready, on every rank."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(source.location)

    def shards() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        interlace.parallelize(model, None)
        interlace.load_full_state_dict(model, source.location)
        return _read(model)

    def whole() -> nn.Module:
        return _read(load(source, dtype))

    ids = torch.arange(16).unsqueeze(0)
    limit = 1e-4 if dtype is torch.float32 else 5e-2
    session.check("loaded", shards().eval()(input_ids=ids).logits, whole()(input_ids=ids).logits, limit)
    timings = session.time({"shards": shards, "whole": whole}, budget_seconds=15.0)
    add(session, "load", "SmolLM2-135M", dtype, None, timings, "shards", "whole", "from_pretrained")


def _read(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.detach().amax()
    return model


def calls(session: Session, dtype: torch.dtype) -> None:
    """What Python costs in a call of a module: column, row and embedding against their ops."""
    ops, group = torch.ops.interlace, session.group.name
    column = interlace.ColumnParallelLinear(64, 64, dtype=dtype)
    row = interlace.RowParallelLinear(64, 64, dtype=dtype)
    table = interlace.VocabParallelEmbedding(64, 64, dtype=dtype)
    x, part = torch.randn(1, 64).to(dtype), torch.randn(1, row.local_in_features).to(dtype)
    ids = torch.zeros(1, dtype=torch.int64)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "column": (lambda: column(x), lambda: ops.column_gemm(x, [column.weight], [column.bias], group)),
        "row": (lambda: row(part), lambda: ops.gemm_all_reduce(part, row.weight, row.bias, group)),
        "embedding": (
            lambda: table(ids),
            lambda: ops.all_reduce(F.embedding(ids, table.weight), group),
        ),
    }
    for name, (module, op) in pairs.items():
        timings = session.time({"module": _often(module), "op": _often(_bare(op))}, budget_seconds=2.0)
        mine = timings.summary("module")
        difference = timings.difference("module", "op") / CALLS
        session.add(
            what="call", model=name, dtype=str(dtype).removeprefix("torch."), tokens=1, ms=difference * 1e3,
            p95_ms=None, baseline="the op alone", baseline_ms=timings.summary("op").median / CALLS * 1e3,
            ratio=timings.ratio("op", "module"), kept=mine.kept, taken=mine.taken,
        )  # fmt: skip


def _bare(op: Callable[[], object]) -> Callable[[], object]:
    """Without the Autograd kernel, which is Python: what the modules do when there are no gradients."""

    def run() -> object:
        with torch._C._AutoDispatchBelowAutograd():
            return op()

    return run


def _often(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("models", COLUMNS, settings)
    found = [asdict(prepare("smollm2", CACHE, session.say)) if session.rank == 0 else None]
    dist.broadcast_object_list(found, 0)
    source = Source(**found[0])  # type: ignore[arg-type]
    calls(session, session.dtypes[0])
    for dtype in session.dtypes:
        loading(session, source, dtype)
        trained = load(source, dtype).requires_grad_(True).train()
        steps(session, "SmolLM2-135M", trained, (128,))
        del trained
        steps(session, "2 x 2048", decoder(dtype), (128,) if session.quick else (128, 512))
    return session.finish()


if __name__ == "__main__":
    command(__file__, run, __doc__)()
