"""Fixtures of the whole suite: worker pools, leak check per module, seeds, and a count of what really ran."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from tests import distributed

# A shell ignores SIGINT for what it runs in the background, and so would every process the tests start: those that
# are sent one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no compiler processes that outlive their test


def pytest_configure(config: pytest.Config) -> None:
    faulthandler.enable()
    config.addinivalue_line("markers", "distributed: runs in worker processes (set by itself)")
    config.addinivalue_line("markers", "slow: more than ten seconds on two cores")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "module", None), "run_distributed", None) is distributed.run_distributed:
            item.add_marker("distributed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the workers, and fails a session that selected distributed tests of which none reached its
    workers."""
    distributed.session.close()
    selected = [item for item in session.items if item.get_closest_marker("distributed")]
    if (
        selected
        and not distributed.session.calls
        and not session.config.option.collectonly
        and not session.testsfailed
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        raise pytest.UsageError(
            f"{len(selected)} distributed tests were selected, but no distributed call ran"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"distributed calls that ran: {distributed.session.calls}")


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    """After each module no file descriptor, child process, shared mapping or /dev/shm entry is left, in
    any process."""
    before = distributed.session.snapshot()
    yield
    found = distributed.session.leaks_since(before)
    assert not found, "left behind by this module:\n" + "\n".join(found)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers for a test whatever ran before it."""
    torch.manual_seed(1234)
