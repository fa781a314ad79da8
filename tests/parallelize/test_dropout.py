"""Split models in training with dropout on: against the unsplit model with the very masks that the ranks draw."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import interlace.random
from interlace.modules import ColumnParallelLinear, RowParallelLinear
from interlace.parallelize.api import parallelize
from tests.distributed import run_distributed
from tests.parallelize import models

BERT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}


class Masks:
    """Stands in for F.dropout in the unsplit model: between the linears that are cut in the split one, every rank's
    part of the mask comes from that rank's stream.
    """

    def __init__(self, split: nn.Module, whole: nn.Module, world_size: int) -> None:
        self.dropout, self.world_size = torch.nn.functional.dropout, world_size
        self.streams: list[torch.Generator] = []
        self.sizes: dict[int, tuple[int, ...]] = {}  # by the size of the dim that is cut
        for name, module in split.named_modules():
            linear = whole.get_submodule(name)
            if isinstance(module, ColumnParallelLinear) and not module.gather_output:
                linear.register_forward_hook(lambda *_: self.open())
                self.sizes[module.out_features] = module.shards.sizes
            elif isinstance(module, RowParallelLinear):
                linear.register_forward_pre_hook(lambda *_: self.streams.clear())

    def open(self) -> None:
        if not self.streams:
            number = int(torch.empty((), dtype=torch.int64).random_()) & 0x7FFFFFFF
            seeds = [interlace.random.stream_seed(number, rank + 1) for rank in range(self.world_size)]
            self.streams = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not self.streams or not training or p == 0:
            return self.dropout(x, p, training)
        dim = 1 if x.dim() == 4 else -1  # heads of attention weights, or features
        sizes = self._parts(x.shape[dim])
        parts = []
        for size, stream in zip(sizes, self.streams, strict=True):
            shape = [*x.shape]
            shape[dim] = size
            parts.append(torch.empty(shape, dtype=x.dtype).bernoulli_(1 - p, generator=stream))
        return x * torch.cat(parts, dim) / (1 - p)

    def _parts(self, total: int) -> list[int]:
        for features, sizes in self.sizes.items():
            if features % total == 0 and all(size % (features // total) == 0 for size in sizes):
                return [size // (features // total) for size in sizes]
        raise AssertionError(f"nothing is cut in {total}")

    @contextmanager
    def installed(self) -> Iterator[None]:
        torch.nn.functional.dropout = self
        try:
            yield
        finally:
            torch.nn.functional.dropout = self.dropout


def _seq2seq(model: nn.Module) -> Tensor:
    ids = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    extra = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **extra).logits


def _t5() -> nn.Module:
    import transformers

    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=61, d_model=24, d_kv=8, d_ff=26, num_layers=2, num_heads=6, dropout_rate=0.2,
        attn_implementation="eager", decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).double()


def _bert() -> nn.Module:
    return models.make("bert", 5, attention="eager", **BERT)


def _equal(rank: int, world_size: int, make: Callable[[], nn.Module]) -> None:
    whole = make().train()
    split = parallelize(copy.deepcopy(whole), None).train()
    masks = Masks(split, whole, world_size)
    results = []
    for model in (whole, split):
        torch.manual_seed(5)
        if model is whole:
            with masks.installed():
                logits = _seq2seq(model)
        else:
            logits = _seq2seq(model)
        logits.square().mean().backward()
        results.append(logits.detach())
    assert interlace.random.in_step(), "ranks fell out of step"
    models.assert_near("logits", results[1], results[0])
    modules, named = dict(split.named_modules()), dict(split.named_parameters())
    for name, param in whole.named_parameters():
        if param.grad is not None:
            want = models.own_part(param.grad, modules[name.rpartition(".")[0]], name)
            models.assert_near(f"gradient of {name}", named[name].grad, want)
    torch.manual_seed(5)
    assert torch.equal(_seq2seq(split).detach(), results[1]), "not reproducible"
    torch.manual_seed(6)
    assert not torch.equal(_seq2seq(split).detach(), results[1]), "nothing was dropped"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("make", [_bert, _t5])
def test_training_with_dropout_is_that_of_the_unsplit_model(world_size: int, make: Any) -> None:
    """5 heads and 54 features over 2 or 3 ranks: heads and features drop other elements on each rank, the hidden
    state drops the same on all, though ranks draw different amounts in between.
    """
    run_distributed(world_size, _equal, make)


def _sequence(rank: int, world_size: int) -> None:
    model = parallelize(models.make("bert", 6, **BERT), None, sequence_parallel=True).train()
    ids = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    seen = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results = []
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(7)
            logits = model(input_ids=ids).logits
            logits.square().mean().backward()
            results.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
            assert interlace.random.in_step()
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, results[0][0])
        assert all(torch.equal(other, everyone[0]) for other in everyone), "replicated logits differ"
        seen.append(results[0])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-9, atol=1e-12)
    torch.manual_seed(7)
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sequence_parallel_dropout_is_reproduced_by_activation_checkpointing(world_size: int) -> None:
    """7 tokens do not divide; a mask drawn anew in the recomputation would give wrong gradients without an error."""
    run_distributed(world_size, _sequence)


def _seeded_apart(rank: int, world_size: int) -> None:
    model = parallelize(models.make("bert", 6, **BERT), None)
    ids = torch.ones(1, 4, dtype=torch.int64)
    torch.manual_seed(rank)
    model.eval()(input_ids=ids)
    with pytest.raises(ValueError, match=r"call interlace\.random\.synchronize"):
        model.train()(input_ids=ids)
    interlace.random.synchronize()
    model(input_ids=ids).logits.sum().backward()
    plain = parallelize(models.make("llama"), None)
    assert not any(m._forward_hooks for m in plain.modules() if isinstance(m, ColumnParallelLinear))


def test_ranks_seeded_apart_are_told_before_they_drop_different_elements() -> None:
    """Each rank would train another model, and the sum of their gradients belongs to none."""
    run_distributed(2, _seeded_apart)


def _compiled(rank: int, world_size: int) -> None:
    model = parallelize(models.make("bert", 5, num_hidden_layers=1, **BERT), None)
    ids = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    for training in (False, True):
        torch._dynamo.reset()
        model.train(training)
        compiled = torch.compile(model, fullgraph=not training, backend="aot_eager")
        found = []
        for call in (model, compiled):
            torch.manual_seed(3)
            found.append(call(input_ids=ids).logits)
            assert interlace.random.in_step()
        torch.testing.assert_close(found[1], found[0])


def test_compiled_training_drops_what_eager_training_drops() -> None:
    """A region is a graph break; traced through, uneven heads would put the ranks out of step. eval has no break."""
    run_distributed(2, _compiled, timeout=240.0)
