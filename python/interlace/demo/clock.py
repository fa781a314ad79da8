"""Times of one phase, prefill or decode: all paths interleaved, each beside its own compute-only twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from torch import Tensor, nn

from interlace.bench import Placement, Timings, fitting_iterations, measure, whole_machine
from interlace.bench.split_paths import SplitPath
from interlace.pretrained.decoder import Decoder

__all__ = [
    "COMPUTE_ONLY",
    "WARMUP",
    "Row",
    "Work",
    "decode_work",
    "prefill_work",
    "rows_of",
    "time_phase",
    "variants_of",
]

COMPUTE_ONLY = " compute only"
FEWEST = 3  # iterations of a phase, whatever the time budget
WARMUP = 2


@dataclass(frozen=True)
class Row:
    """One line of the table. exposed_ms: ms minus the compute-only twin's, per iteration, median of these."""

    phase: str
    path: str
    ms: float
    tokens_per_second: float
    exposed_ms: float
    ratio: float

    def keys(self) -> dict[str, str | float]:
        return asdict(self)


Work = Callable[[nn.Module], Callable[[], object]]


def prefill_work(ids: Tensor, causal: bool) -> Work:
    """ids [1, P]: run the prompt; a decoder fills its cache and gives the last token's logits."""
    if causal:
        return lambda model: lambda: Decoder(model)(ids)
    return lambda model: lambda: model(input_ids=ids)


def decode_work(ids: Tensor) -> Work:
    """ids [1, P + 1]: a token more after a prompt of P; each call has a context one longer than the last."""

    def of(model: nn.Module) -> Callable[[], object]:
        decoder = Decoder(model)
        decoder(ids[:, :-1])
        return lambda: decoder(ids[:, -1:])

    return of


def variants_of(
    work: Work, unsplit: nn.Module | None, paths: list[SplitPath], placement: Placement
) -> dict[str, Callable[[], object]]:
    """What `measure` runs. The unsplit model runs on rank 0 with the cores of all ranks; the others wait."""
    variants: dict[str, Callable[[], object]] = {"unsplit": lambda: None}
    if unsplit is not None:
        with whole_machine(placement):
            alone = work(unsplit)

        def unsplit_call() -> None:
            with whole_machine(placement):
                alone()

        variants["unsplit"] = unsplit_call
    for path in paths:
        for name, model in ((path.name, path.model), (path.name + COMPUTE_ONLY, path.compute_only)):
            with path.backend():
                variants[name] = _under(path, work(model))
    return variants


def _under(path: SplitPath, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        with path.backend():
            call()

    return run


def time_phase(
    variants: Mapping[str, Callable[[], object]],
    budget_seconds: float,
    most: int,
    progress: Callable[[int, int], None],
) -> Timings:
    """Warm up, then as many iterations as the budget allows."""
    iterations = fitting_iterations(
        variants, budget_seconds, fewest=min(FEWEST, most), most=most, warmup=WARMUP
    )
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, iterations)

    return measure(variants, iterations=iterations, warmup=0, progress=tick)


def rows_of(phase: str, tokens: int, timings: Timings, paths: list[SplitPath]) -> list[Row]:
    """The phase's lines: unsplit first. ratio: how many times faster than gloo, of one iteration, median."""
    rows = []
    for name in ("unsplit", *(path.name for path in paths)):
        seconds = timings.summary(name).median
        exposed = 0.0 if name == "unsplit" else timings.difference(name, name + COMPUTE_ONLY)
        rows.append(
            Row(
                phase=phase,
                path=name,
                ms=seconds * 1e3,
                tokens_per_second=tokens / seconds,
                exposed_ms=exposed * 1e3,
                ratio=timings.ratio("gloo", name),
            )
        )
    return rows
