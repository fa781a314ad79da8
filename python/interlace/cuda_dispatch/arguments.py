"""Operands as the kernels read them.

A mistake that all ranks make, they all raise for, and the group goes on. Peers of a rank that is alone with its mistake
raise CollectiveTimeout: stopping their kernels at once would end the group for a ValueError that can be caught.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import reference

__all__ = ["aligned_matrices", "aligned_rows"]

_TRANSFER_BYTES = 16  # TMA and cp.async read rows that start at multiples of it


def aligned_rows(x: Tensor) -> Tensor:
    """x [.., K] -> [M, K] as the kernels read it: inner stride 1, rows at multiples of 16 bytes. Copies when needed.

    What one rank has to copy another need not: nothing that the ranks decide together depends on it.
    """
    rows = reference.flat_rows(x)
    return rows if _readable(rows) else _padded(rows)


def aligned_matrices(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights [N, K] as one launch reads them: all by rows of K, or all by rows of N; copied where they are neither.

    fp8 has one layout: wgmma reads rows of K only.
    """
    if weights[0].element_size() > 1 and all(_readable(w.t()) for w in weights):
        return list(weights)
    return [w if _readable(w) else _padded(w) for w in weights]


def _readable(matrix: Tensor) -> bool:
    inner = matrix.stride(1) == 1 or matrix.shape[1] == 1
    rows_apart = matrix.stride(0) * matrix.element_size()
    far = matrix.shape[0] <= 1 or (rows_apart % _TRANSFER_BYTES == 0 and matrix.stride(0) >= matrix.shape[1])
    return inner and far and _address(matrix) % _TRANSFER_BYTES == 0


def _address(tensor: Tensor) -> int:
    return tensor.storage_offset() * tensor.element_size() + tensor.untyped_storage().data_ptr()


def _padded(matrix: Tensor) -> Tensor:
    step = _TRANSFER_BYTES // matrix.element_size()
    columns = -(-matrix.shape[1] // step) * step
    copy = matrix.new_empty((matrix.shape[0], columns))[:, : matrix.shape[1]]
    return copy.copy_(matrix)
