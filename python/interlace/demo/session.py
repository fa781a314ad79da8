"""The demo on one rank: load, split, compare, time. Rank 0 speaks and judges, all return its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.bench import Placement, describe, peer_read_bandwidth, place
from interlace.bench.split_paths import split_paths
from interlace.demo.clock import WARMUP, Row, decode_work, prefill_work, rows_of, time_phase, variants_of
from interlace.demo.compare import Subject, compare
from interlace.demo.report import Reporter
from interlace.demo.text import TEXT
from interlace.pretrained.models import Source, load, load_words, settings_of

__all__ = ["Plan", "run"]

PREFILL_TOKENS = 128
BUDGET_SECONDS = {False: 20.0, True: 4.0}  # of one phase; with --quick
MOST_ITERATIONS = {"prefill": 15, "decode": 40}


@dataclass(frozen=True)
class Plan:
    """What the command line asked for; crosses to the ranks as JSON."""

    location: str
    title: str
    causal: bool
    dtype: str
    quick: bool
    json: str | None

    @property
    def source(self) -> Source:
        return Source(self.location, self.title, self.causal)


def run(settings: Mapping[str, object]) -> int:
    """What every rank calls: 0 when all split paths equal the unsplit model, else 1."""
    plan = Plan(**settings)  # type: ignore[arg-type]
    torch.set_grad_enabled(False)
    placement = place(dist.get_rank(), dist.get_world_size())
    reporter = Reporter(plan.json, speaking=dist.get_rank() == 0)
    reporter.opening(plan.title, plan.dtype, str(placement))
    subject = _load_and_split(plan)
    reporter.sizes(subject)
    verdict = compare(subject, placement)
    reporter.parity(verdict)
    rows = _time(plan, subject, placement, reporter)
    machine = describe(len(placement.cores), peer_read_bandwidth(dist.barrier)) | {
        "model": plan.location,
        "dtype": plan.dtype,
        "ranks": dist.get_world_size(),
        "placement": str(placement),
    }
    reporter.closing(verdict, rows, machine)
    failed = torch.tensor(int(verdict is not None and bool(verdict.wrong)))
    dist.broadcast(failed, 0)
    return int(failed)


def _load_and_split(plan: Plan) -> Subject:
    dtype = getattr(torch, plan.dtype)
    whole = load(plan.source, dtype)
    words = load_words(plan.source, settings_of(whole).vocab_size)
    unsplit = exact = None
    if dist.get_rank() == 0:
        unsplit = load(plan.source, dtype)
        exact = unsplit if dtype == torch.float32 else load(plan.source, dtype).float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    split = interlace.parallelize(whole, mesh["tp"])
    return Subject(split_paths(split), words, plan.causal, dtype, unsplit, exact)


def _time(plan: Plan, subject: Subject, placement: Placement, reporter: Reporter) -> list[Row]:
    ids = subject.words.encode(TEXT)[:, : subject.longest]
    prompt = min(PREFILL_TOKENS, ids.shape[1] - 1, subject.longest // 2)
    most = dict(MOST_ITERATIONS)
    phases = {"prefill": (prompt, prefill_work(ids[:, :prompt], plan.causal))}
    if plan.causal:
        phases["decode"] = (1, decode_work(ids[:, : prompt + 1]))
        most["decode"] = min(most["decode"], subject.longest - prompt - 1 - WARMUP)
    rows: list[Row] = []
    for phase, (tokens, work) in phases.items():
        variants = variants_of(work, subject.unsplit, subject.paths, placement)
        with reporter.progress(phase) as tick:
            timings = time_phase(variants, BUDGET_SECONDS[plan.quick], most[phase], tick)
        reporter.disturbances(phase, timings)
        rows += rows_of(phase, tokens, timings, subject.paths)
    return rows
