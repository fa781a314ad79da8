"""The look of the report: wide and narrow, light and dark, in colours that colour-blind readers tell apart."""

from __future__ import annotations

__all__ = ["PALETTE", "STYLE"]

# Okabe and Ito's palette: apart for all common forms of colour blindness, and in lightness
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D1F", "#8A8A8A")

_PAGE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #5a5a5a; --line: #d8dade; --paper: #ffffff;
  --tint: #f3f5f7; --c0: #0072B2; --good: #00694c; --bad: #b03a00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #b3b3b3; --line: #45484d; --paper: #16181b; --tint: #23262b;
    --c0: #3d9bd8; --good: #43c79d; --bad: #ff8a4c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 74rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0.3rem 0 0.6rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 0.3rem; padding-top: 0.6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.3rem; }
p { margin: 0.4rem 0; max-width: 60rem; }
code { font-size: 0.85em; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; margin: 0.6rem 0; }
a { color: var(--c0); }
.soft { color: var(--soft); font-size: 0.9rem; }
.bad { color: var(--bad); font-weight: 700; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.5rem; margin: 0.8rem 0; }
.facts div { background: var(--tint); border-radius: 0.5rem; padding: 0.5rem 0.75rem; font-size: 0.85rem;
  color: var(--soft); line-height: 1.35; }
.facts b { display: block; font-size: 1.35rem; color: var(--ink); }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.86rem; margin: 0.4rem 0; }
th, td { padding: 0.25rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
td.words, th.words { text-align: left; }
.cases { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0.9rem 2rem;
  margin: 0.6rem 0; }
.case > b { font-size: 0.85rem; font-weight: 600; }
.bar { display: grid; grid-template-columns: 9rem 1fr 4.6rem; gap: 0 0.5rem; align-items: center;
  font-size: 0.8rem; margin-top: 0.15rem; }
.bar span { text-align: right; font-variant-numeric: tabular-nums; }
.bar .who { text-align: left; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.track { display: flex; height: 1.05rem; background: var(--tint); border-radius: 2px; overflow: hidden; }
.track i { display: block; height: 100%; }
.track i.hid, .keys .hid::before { background: repeating-linear-gradient(135deg, var(--c0) 0 4px, #8fd0f5 4px 7px); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0.5rem 2rem; }
.keys { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; margin: 0.4rem 0; font-size: 0.85rem; }
.keys span::before { content: ""; display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.35rem;
  vertical-align: -0.06rem; background: var(--key); }
.keys .round::before { border-radius: 50%; }
.keys .dashed::before { background: none; border-top: 3px dashed var(--key); height: 0.25rem; vertical-align: 0.2rem;
  width: 1.2rem; }
svg.plot { width: 100%; max-width: 36rem; height: auto; display: block; }
svg.time { width: 100%; min-width: 44rem; height: auto; display: block; }
svg text { fill: var(--ink); font: 10.5px system-ui, sans-serif; }
svg.time text { font-size: 9px; }
svg text.axis { fill: var(--soft); }
svg text.strong { font-weight: 700; font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .lane { fill: var(--tint); }
svg polyline { fill: none; stroke-width: 2; }
details { margin: 0.6rem 0; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 40rem) {
  body { padding: 0.8rem; }
  .bar { grid-template-columns: 5.8rem 1fr 4.3rem; }
  .facts { grid-template-columns: 1fr 1fr; }
  .facts b { font-size: 1.15rem; }
  th:first-child, td:first-child { white-space: normal; min-width: 9.5rem; max-width: 9.5rem; }
}
"""


def _colors() -> str:
    """Classes of every colour: fN fills, sN strokes, kN is its key in a legend, bN a part of a bar."""
    lines = []
    for index, color in enumerate(PALETTE):
        value = "var(--c0)" if index == 0 else color
        lines.append(
            f".f{index} {{ fill: {value}; }} .s{index} {{ stroke: {value}; }} "
            f".keys .k{index} {{ --key: {value}; }} .b{index} {{ background: {value}; }}"
        )
    return "\n".join(lines) + "\n"


STYLE = _PAGE + _colors()
