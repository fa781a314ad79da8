"""The Promela models of the signal protocol: every interleaving of a few ranks and calls.

Only here is a rare order of events certain to occur: a rank that refuses one call and runs ahead into the
next while a peer still reads, a counter that wraps. The broken variants show that the models can see it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load_checker() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "csrc" / "models" / "check.py"
    spec = importlib.util.spec_from_file_location("signal_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


checker = _load_checker()
missing = checker.missing_tool()
pytestmark = pytest.mark.skipif(missing is not None, reason=f"needs spin and gcc; {missing} is not installed")


@pytest.mark.parametrize("run", checker.CLEAN, ids=lambda run: run.name)
def test_protocol_holds_in_every_interleaving(run) -> None:
    """Would catch: a half overwritten while a peer reads it, a hang, a refused call that succeeds."""
    outcome = checker.search(run)
    assert outcome.error is None
    assert outcome.states > 10_000, "the search was too small to mean anything"


@pytest.mark.parametrize("run", checker.MUTANTS, ids=lambda run: run.name)
def test_a_broken_rule_has_a_counterexample(run) -> None:
    """Would catch: a model that no longer says anything about the rule."""
    assert checker.search(run).error == run.expected
