"""GPUs as torch sees them: what each is, who reaches whom, and whether NVLink multicast (NVLS) is there."""

from __future__ import annotations

import torch

__all__ = ["gpus"]


def gpus() -> dict[str, object]:
    """Devices and their links, or the reason why there are none."""
    if torch.version.cuda is None:
        return {"devices": [], "reason": f"torch {torch.__version__} is a CPU build"}
    if not torch.cuda.is_available():
        return {"devices": [], "reason": "torch finds no CUDA device or no driver"}
    count = torch.cuda.device_count()
    return {
        "devices": [_device(index) for index in range(count)],
        "peer_access": [
            [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)
        ],
        "multicast": [_has_multicast(index) for index in range(count)],
    }


def _device(index: int) -> dict[str, object]:
    facts = torch.cuda.get_device_properties(index)
    return {
        "name": facts.name,
        "architecture": f"sm_{facts.major}{facts.minor}",
        "memory": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
    }


def _has_multicast(index: int) -> bool:
    """False as well on a torch whose symmetric memory does not say: the multicast path is then not used."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))
    except (ImportError, AttributeError, RuntimeError):
        return False
