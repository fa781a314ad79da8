"""Fixtures of the emulator tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.device import emulation
from tests.device.emulation import Mutant, Result

SEEDS = 4


@pytest.fixture(scope="module")
def end_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Mutant], Result]]:
    """How a mutant's program ends. The mutants of the module's selected tests are built and run side by side.

    A test that takes the fixture has a parameter `mutant`.
    """
    selected = [
        item.callspec.params["mutant"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "end_of" in item.fixturenames
    ]
    folder = tmp_path_factory.mktemp("mutants")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs: dict[object, Future[Result]] = {
            mutant: pool.submit(emulation.run_with_bug, mutant, folder / mutant.name, SEEDS)
            for mutant in selected
        }
        yield lambda mutant: runs[mutant].result()
        pool.shutdown(cancel_futures=True)
