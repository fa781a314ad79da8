"""docs/signals.md names code and tests rule by rule: the names must exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUOTED = re.compile(r"`([^`\n]+)`")
IS_PATH = re.compile(r"^(csrc|tests|Makefile)(/|$)")


def _names_by_path(text: str) -> list[tuple[str, str]]:
    """Every (path, name): a quoted path owns the quoted names that follow it in its line or list item."""
    pairs = []
    for item in re.split(r"\n(?=\S)|\|", text):
        path = None
        for quoted in QUOTED.findall(item):
            if IS_PATH.match(quoted):
                path = quoted
                pairs.append((path, ""))
            elif path is not None and re.fullmatch(r"\w[\w-]*", quoted):
                pairs.append((path, quoted))
    return pairs


def test_names_in_the_signal_rules_exist() -> None:
    """Would catch: a function, word, model or planted bug that was renamed or deleted while the rule still cites it."""
    pairs = _names_by_path((ROOT / "docs" / "signals.md").read_text())
    assert len(pairs) > 80, "the page cites too little to be read right"
    for path, name in pairs:
        assert (ROOT / path).exists(), f"docs/signals.md cites {path}, which does not exist"
        text = (ROOT / path).read_text()
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), f"docs/signals.md: {path} has no {name}"


def test_every_rule_has_code_and_a_planted_bug() -> None:
    """Would catch: a rule that nothing enforces."""
    rules = re.split(r"\n\*\*\d+\. ", (ROOT / "docs" / "signals.md").read_text().split("## How")[0])[1:]
    assert len(rules) == 9
    for rule in rules:
        title = rule.split("**", 1)[0]
        assert "- Code: `csrc/" in rule, f"no code for: {title}"
        assert "- Bugs planted: `" in rule, f"no bug for: {title}"
