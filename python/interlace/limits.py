"""What this process may use of the machine: address space for segments."""

from __future__ import annotations

import resource

__all__ = ["address_space"]

# sparse: costs page-table entries only where it is touched. Room for any growth without mapping anything again.
_RESERVE_BYTES = 16 << 30
_RESERVE_BYTES_LIMITED = 256 << 20  # under `ulimit -v`


def address_space() -> int:
    """Bytes of address space to reserve for each rank's segment."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _RESERVE_BYTES if soft == resource.RLIM_INFINITY else _RESERVE_BYTES_LIMITED
