"""One rank of a run, from the process group on: mesh, model, steps, record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from interlace.bench.cores import available_cores

from .data import Batches
from .loop import Pipeline, Replica, optimizer_of
from .memory import sharded_states, tracked_step
from .model import build, chunks_of, model_config, shard
from .record import record, write
from .settings import Settings

__all__ = ["run"]

UNTIMED = 1  # the first step builds states and buffers


def run(settings: Mapping[str, Any]) -> int:
    """What every rank calls inside a process group: trains, prints on rank 0, writes run.json; 0."""
    wanted = Settings(**settings)
    if dist.get_world_size() != wanted.world_size:
        raise ValueError(
            f"train: dp x tp x pp = {wanted.dp} x {wanted.tp} x {wanted.pp} = {wanted.world_size}, "
            f"but {dist.get_world_size()} ranks run"
        )
    torch.set_num_threads(max(1, min(torch.get_num_threads(), len(available_cores()) // wanted.world_size)))
    sizes = (wanted.pp, wanted.dp, wanted.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    config = model_config(wanted.model)
    trainer = _trainer(config, wanted, mesh)
    batches = Batches(
        batch=wanted.global_batch, seq=wanted.seq, vocab=config.vocab_size, seed=wanted.seed, text=wanted.text
    )
    speaking = dist.get_rank() == 0
    losses, seconds = [], []
    for number in range(wanted.steps):
        dist.barrier()
        begin = time.perf_counter()
        losses.append(trainer.step(batches, number))
        seconds.append(_slowest(time.perf_counter() - begin))
        if speaking:
            print(f"step {number}: loss {losses[-1]:.6f}, {seconds[-1] * 1e3:.1f} ms", flush=True)
    timed = seconds[UNTIMED:] or seconds
    memory: dict[str, int] = {}
    if wanted.track:
        seen = sharded_states if wanted.zero > 1 and wanted.dp > 1 else tracked_step
        memory = seen(
            trainer.modules, trainer.optimizer, lambda mark: trainer.step(batches, wanted.steps, mark)
        )
    everyone: list[Any] = [None] * wanted.world_size
    dist.all_gather_object(everyone, (memory, mesh["pp"].get_local_rank()))
    if speaking:
        content = record(
            wanted,
            config.to_dict(),
            cores=torch.get_num_threads() * wanted.world_size,
            losses=losses,
            seconds=timed,
            memory=[part for part, _ in everyone],
            stages=[stage for _, stage in everyone],
        )
        rate = content["tokens_per_second"]
        print(f"median {content['step_seconds'] * 1e3:.1f} ms per step, {rate:.0f} tokens/s", flush=True)
        if wanted.out:
            write(content, wanted.out)
            print(f"wrote {wanted.out}; compare it with: interlace plan --verify {wanted.out}", flush=True)
    return 0


def _trainer(config: Any, settings: Settings, mesh: DeviceMesh) -> Replica | Pipeline:
    if settings.pp == 1:
        model = build(config, settings, mesh, None)
        model = shard(model, settings, mesh)
        return Replica(model, optimizer_of(model.parameters(), settings, mesh), settings, mesh)
    rank = mesh["pp"].get_local_rank()
    layers = int(config.num_hidden_layers)
    if layers < settings.pp * settings.interleave:
        raise ValueError(f"train: {layers} layers for {settings.pp} stages x {settings.interleave} chunks")
    stages = [build(config, settings, mesh, chunk) for chunk in chunks_of(layers, settings, rank)]
    numbers = [rank + chunk * settings.pp for chunk in range(settings.interleave)]
    parameters = (parameter for stage in stages for parameter in stage.parameters())
    return Pipeline(stages, numbers, optimizer_of(parameters, settings, mesh), settings, mesh)


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
