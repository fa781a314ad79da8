"""The steps of one rank: forward, backward and update of a replica, or its stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .data import Batches
from .memory import Mark
from .settings import Settings

__all__ = ["Pipeline", "Replica", "loss_of", "optimizer_of"]


def _nothing() -> None:
    """What a step that is not measured marks."""


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32: logits [b, s, vocab], labels [b, s]."""
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def optimizer_of(
    parameters: Iterator[nn.Parameter], settings: Settings, mesh: DeviceMesh
) -> torch.optim.Optimizer:
    """AdamW; its states split over the data-parallel ranks for ZeRO-1."""
    options = {"lr": settings.learning_rate, "weight_decay": 0.0}
    if settings.zero == 1 and settings.dp > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        group = mesh["dp"].get_group()
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=group, **options)
    return torch.optim.AdamW(parameters, foreach=False, **options)


class Replica:
    """Steps without a pipeline: micro-batches one after the other, gradients summed over replicas after the last."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, mesh: DeviceMesh
    ) -> None:
        self.modules, self.optimizer = [model], optimizer
        self._model, self._settings, self._mesh = model, settings, mesh

    def step(self, batches: Batches, number: int, mark: Mark = _nothing) -> float:
        """One step; the loss is the mean over the global batch."""
        settings, replica = self._settings, self._mesh["dp"].get_local_rank()
        ids, labels = batches.of(number, replica, settings.dp)
        total = torch.zeros(())
        for index in range(settings.microbatches):
            rows = slice(index * settings.microbatch, (index + 1) * settings.microbatch)
            with self._synchronised(index == settings.microbatches - 1):
                logits = self._model(input_ids=ids[rows], use_cache=False).logits
                loss = loss_of(logits, labels[rows]) / settings.microbatches
                mark()
                loss.backward()
            total += loss.detach()
            del logits, loss
        mark()
        self.optimizer.step()
        # DDP's gradients are views of its buckets; freed, they would be made again beside the buckets
        self.optimizer.zero_grad(set_to_none=not isinstance(self._model, nn.parallel.DistributedDataParallel))
        if settings.dp > 1:
            dist.all_reduce(total, group=self._mesh["dp"].get_group())
        return float(total / settings.dp)

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        model: Any = self._model
        if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
            with model.no_sync():
                yield
            return
        if hasattr(model, "set_requires_gradient_sync"):  # ZeRO-2 and 3 scatter after every micro-batch
            model.set_requires_gradient_sync(True)
        yield


class Pipeline:
    """Steps of a rank's stages under one of torch's schedules."""

    def __init__(
        self,
        stages: list[nn.Module],
        numbers: list[int],
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        mesh: DeviceMesh,
    ) -> None:
        from torch.distributed import pipelining as pp

        self.modules, self.optimizer = stages, optimizer
        self._settings, self._mesh = settings, mesh
        self._group, self._mark = mesh["pp"].get_group(), _nothing
        for stage in stages:  # a stage's activations are most when one of its forwards has just ended
            stage.register_forward_hook(lambda *_: self._mark())
        parts = settings.pp * settings.interleave
        built = [
            pp.PipelineStage(stage, number, parts, torch.device("cpu"), group=self._group)
            for stage, number in zip(stages, numbers, strict=True)
        ]
        count = settings.microbatches
        if settings.schedule == "interleaved":
            self._schedule: Any = pp.ScheduleInterleaved1F1B(built, count, loss_fn=self._loss)
        else:
            kind = pp.Schedule1F1B if settings.schedule == "1f1b" else pp.ScheduleGPipe
            self._schedule = kind(built[0], count, loss_fn=self._loss)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = loss_of(logits, labels)
        self._mark()
        return loss

    def step(self, batches: Batches, number: int, mark: Mark = _nothing) -> float:
        """One step; the loss is the mean over the global batch, known to all ranks."""
        settings, rank = self._settings, self._mesh["pp"].get_local_rank()
        ids, labels = batches.of(number, self._mesh["dp"].get_local_rank(), settings.dp)
        losses: list[torch.Tensor] = []
        self._mark = mark
        target = labels if rank == settings.pp - 1 else None
        self._schedule.step(
            *((ids,) if rank == 0 else ()), target=target, losses=losses, return_outputs=False
        )
        self._mark = _nothing
        if settings.dp > 1:
            self._average()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total, group=self._group)
        if settings.dp > 1:
            dist.all_reduce(total, group=self._mesh["dp"].get_group())
        return float(total / settings.dp)

    def _average(self) -> None:
        """Gradients averaged over the replicas of each stage, after the last micro-batch."""
        group = self._mesh["dp"].get_group()
        for stage in self.modules:
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= self._settings.dp
