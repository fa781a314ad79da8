"""Targets that test_ranks starts on every rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(settings: Mapping[str, Any]) -> int:
    """Do what the settings say; every rank writes its pid first, so that the test can find it afterwards."""
    rank = dist.get_rank()
    Path(settings["folder"], f"pid{rank}").write_text(str(os.getpid()))
    what = settings["what"]
    if what == "sum":
        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        Path(settings["folder"], f"sum{rank}").write_text(str(int(total)))
    elif what == "fail" and rank == 1:
        return 3
    elif what == "killed" and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stay":
        dist.barrier()
        os.write(1, b"ready\n")  # in one piece: the ranks share the pipe
    if what != "sum":
        signal.pause()
    return 0


if __name__ == "__main__":
    from interlace.bench import launch

    sys.exit(launch(f"{__file__}:run", {"folder": sys.argv[1], "what": "stay"}, 2))
