"""Who may share memory: decided from what the ranks told each other, alike on every rank."""

from __future__ import annotations

import dataclasses

import pytest

from interlace import symmetric_memory
from interlace.symmetric_memory import _Member, _oversubscribed, _why_not_shared

HERE = ("boot", "net:[1]", "pid:[1]")


def member(**changes: object) -> _Member:
    """A rank on this host with two cores and one thread."""
    plain = _Member(
        host=HERE,
        pid=1,
        door=symmetric_memory._Door("\0a", b""),
        cores=(0, 1),
        threads=1,
        reserve=1 << 30,
        half=4096,
        max_half=8192,
        first_epoch=0,
    )
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("place", range(3))
def test_ranks_share_memory_only_under_one_kernel_and_in_the_same_namespaces(place: int) -> None:
    """Catches a check by host name, which containers share: boot, network and process namespace must all be equal."""
    other = tuple("other" if i == place else part for i, part in enumerate(HERE))
    assert _why_not_shared([member(), member(pid=2)]) == ""
    assert "2 hosts" in _why_not_shared([member(), member(host=other)])


def test_more_ranks_than_a_pointer_table_holds_fall_back() -> None:
    """Catches a table written past its end."""
    assert _why_not_shared([member(pid=i) for i in range(8)]) == ""
    assert "9 ranks" in _why_not_shared([member(pid=i) for i in range(9)])


@pytest.mark.parametrize("change", [{"half": 8192}, {"max_half": 1 << 20}, {"first_epoch": 3}])
def test_ranks_that_ask_for_different_workspaces_are_refused(change: dict[str, int]) -> None:
    """Catches halves at different offsets: rank 0 would read where rank 1 never wrote."""
    with pytest.raises(ValueError, match="rank 1 asks for another"):
        _why_not_shared([member(), member(**change)])


def test_ranks_yield_early_when_their_threads_outnumber_the_cores() -> None:
    """Catches counting this rank's cores only: two ranks pinned to one core must not spin at each other."""
    assert not _oversubscribed([member(cores=(0,)), member(cores=(1,))], rank=0)
    assert _oversubscribed([member(cores=(0,)), member(cores=(0,))], rank=0)
    with pytest.warns(UserWarning, match="set_num_threads"):
        assert _oversubscribed([member(threads=2), member(threads=2)], rank=0)


def test_this_host_is_known_by_its_boot_and_namespaces() -> None:
    """Catches an identity that changes between two calls, which would send every group to the fallback."""
    assert symmetric_memory._host() == symmetric_memory._host()
    assert all(symmetric_memory._host())
