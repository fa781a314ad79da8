"""Descriptors, swizzles and fragments against torch.mm, with inputs that show where a wrong element came from.

Each probe has one nonzero in x (or a whole row or column of different numbers), so that out says which element of the
weight met which column of x, and where the product was stored. A failure prints the first places that differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.device.gpu import launches
from tests.device.gpu.correctness import Case
from tests.device.gpu.launches import Options
from tests.device.gpu.problems import FP8

# depth of one stage of the pipeline: 128 bytes of a row
STAGE = {torch.bfloat16: 64, torch.float16: 64, FP8: 128}
ROWS = 256  # two tiles: both consumer warpgroups, twice


def cases(device: str) -> Iterator[Case]:
    """One case for each instance of the plain kernel."""
    for dtype in (torch.bfloat16, torch.float16, FP8):
        for tile_columns in (128, 256):
            if tile_columns == 256 and dtype != torch.bfloat16:
                continue
            for mn_major in (False, True):
                if mn_major and dtype == FP8:
                    continue
                for mainloop in (90, 80):
                    if mainloop == 80 and (dtype == FP8 or tile_columns == 256):
                        continue
                    yield Case(
                        f"calibration sm_{mainloop} {dtype} 128x{tile_columns} {'MN' if mn_major else 'K'}-major",
                        lambda a=(device, dtype, tile_columns, mn_major, mainloop): probe(*a),
                    )


def probe(device: str, dtype: torch.dtype, tile_columns: int, mn_major: bool, mainloop: int) -> None:
    """Every column of K alone, then every row alone, then all together for depths around the stages of the pipeline."""
    depth, columns = STAGE[dtype], tile_columns
    options = Options(tile_columns=tile_columns, mainloop=mainloop, comm_blocks=0)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        stored = weight.t().contiguous().t() if mn_major else weight.contiguous()
        scales = {"x_scale": torch.ones(1, device=device), "weight_scales": [torch.ones(1, device=device)]}
        return launches.gemm([x], [stored], [None], options, **(scales if dtype == FP8 else {}))[0]

    # out[r, n] = weight[n, r % depth]: which column of the weight a row of x meets
    x = torch.zeros(ROWS, depth, device=device)
    x[torch.arange(ROWS), torch.arange(ROWS) % depth] = 1
    numbers = torch.arange(columns * depth, device=device).reshape(columns, depth) % 13 - 6
    weight = numbers.to(torch.float32).to(dtype)
    check_places("column of K", run(x.to(dtype), weight), x.double() @ weight.double().t())
    # out[r, n] = x[r, n % depth]: which row of x a row of the weight meets
    picks = torch.zeros(columns, depth, device=device)
    picks[torch.arange(columns), torch.arange(columns) % depth] = 1
    rows = (torch.arange(ROWS * depth, device=device).reshape(ROWS, depth) * 7 % 15 - 7).float().to(dtype)
    check_places("row of x", run(rows, picks.to(dtype)), rows.double() @ picks.double().t())
    generator = torch.Generator().manual_seed(depth)
    for stages in (1, 2, 3, 4, 5, 8, 9):
        for extra in (0, 16):
            k = stages * depth + extra
            many = torch.randint(-1, 2, (ROWS - 3, k), generator=generator).float().to(dtype).to(device)
            other = torch.randint(-1, 2, (columns + 24, k), generator=generator).float().to(dtype).to(device)
            exact = many.double() @ other.double().t()
            check_places(f"depth {k}", run(many, other), exact)


def check_places(what: str, out: Tensor, exact: Tensor) -> None:
    """Equal element by element; the text shows where the first wrong elements lie."""
    wrong = (out.double() != exact.to(out.dtype).double()).nonzero()
    if len(wrong) == 0:
        return
    shown = "; ".join(
        f"[{r}, {n}] is {out[r, n].item():g}, not {exact[r, n].item():g}" for r, n in wrong[:8].tolist()
    )
    rows, columns = wrong[:, 0].unique(), wrong[:, 1].unique()
    raise AssertionError(
        f"{what}: {len(wrong)} of {out.numel()} elements are wrong, in {len(rows)} rows and {len(columns)} columns: "
        f"{shown}"
    )
