"""What a choice of algorithm needs to know about the GPUs of a group: a description that every rank holds alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["KNOWN", "Hardware", "agreed", "describe"]

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """One GPU and what joins it to its peers.

    capability: compute capability (major, minor). multiprocessors: how many. memory: bytes. link: "nvlink" or "pcie".
    peer_access: each GPU reads and writes the memory of the others. multicast: the switch reduces and multiplies
    stores (NVLink SHARP), so multimem instructions work.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    link: str = "nvlink"
    peer_access: bool = True
    multicast: bool = False

    @property
    def mainloop(self) -> str:
        """Which of the GEMM kernels runs here: sm_90a (TMA, wgmma), sm_80 (cp.async, mma.sync) or "" for none."""
        if self.capability == (9, 0):
            return "sm_90a"
        return "sm_80" if self.capability[0] in (8, 10) else ""


# Data sheets of the vendor: multiprocessors and memory of the SXM boards, of the PCIe board for L20.
KNOWN = {
    hardware.name: hardware
    for hardware in (
        Hardware("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * GIB, "nvlink", True, True),
        Hardware("NVIDIA H200", (9, 0), 132, 141 * GIB, "nvlink", True, True),
        Hardware("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * GIB, "nvlink", True, False),
        Hardware("NVIDIA B200", (10, 0), 148, 180 * GIB, "nvlink", True, True),
        Hardware("NVIDIA L20", (8, 9), 92, 48 * GIB, "pcie", True, False),
    )
}


def describe(device: torch.device) -> Hardware:
    """The description of a CUDA device as this process sees it; what joins the GPUs is agreed on by the group."""
    properties: Any = torch.cuda.get_device_properties(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != index]
    return Hardware(
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        memory=properties.total_memory,
        link="nvlink" if _has_nvlink(index) else "pcie",
        # one visible device says nothing about the peers: the rendezvous of the group finds out
        peer_access=all(torch.cuda.can_device_access_peer(index, other) for other in others),
        multicast=False,
    )


def _has_nvlink(index: int) -> bool:
    """Whether any NVLink leaves the device; no when the driver does not say."""
    try:
        matrix = torch._C._distributed_c10d._detect_dma_connectivity(
            torch._C._autograd.DeviceType.CUDA, "nvlink"
        ).matrix
    except (RuntimeError, AttributeError):
        return False
    return index < len(matrix) and any(matrix[index])


def agreed(everyone: list[Hardware]) -> tuple[Hardware, str]:
    """One description for a group, from those of its ranks in rank order, and why its GPUs cannot be fused over.

    Pure, so every rank that was told the same list gets the same answer. The reason is empty when they can.
    """
    first = everyone[0]
    others = sorted({h.name for h in everyone} - {first.name})
    slowest = replace(
        first,
        multiprocessors=min(h.multiprocessors for h in everyone),
        memory=min(h.memory for h in everyone),
        link="nvlink" if all(h.link == "nvlink" for h in everyone) else "pcie",
        peer_access=all(h.peer_access for h in everyone),
        multicast=all(h.multicast for h in everyone),
    )
    if any(h.capability != first.capability for h in everyone):
        return slowest, f"the ranks have different GPUs: {first.name} and {', '.join(others)}"
    return slowest, ""
