"""What the demo reads and asks: written for this purpose, so that nothing is fetched for it."""

from __future__ import annotations

__all__ = ["QUESTION", "SENTENCES", "TEXT"]

TEXT = """\
The lighthouse keeper had a habit of writing down the weather three times a day, although nobody had ever
asked him \\ to. In the morning he noted the colour of the sky and the direction of the wind. At noon he
measured how far the \\ water had climbed up the stone steps. In the evening, when the lamp was lit and the
first ships passed the point, he \\ wrote a single sentence about the sea, and he tried never to use the same
sentence twice.

After thirty years the notebooks filled a whole wall. A young scientist from the university heard of them and
came \\ by boat to see whether they were of any use. She expected a few dates and some remarks about storms.
Instead she \\ found a record so regular that she could draw the tides of three decades from it without a gap.
The water on the \\ steps had risen by the width of a hand in that time. It had risen so slowly that no one on
the island had noticed, \\ but the numbers in the notebooks left no doubt.

She asked the keeper why he had gone to all that trouble. He thought about it while he trimmed the wick. A
lamp, he \\ said at last, is only useful if it burns every night. It does not have to be very bright, and it
does not have to \\ know which ship is coming. It only has to be there. He supposed that it was the same with
writing things down. Most \\ days nothing happens, and it is easy to believe that the next line will not
matter. Then somebody sails past who \\ needs to know exactly where the rocks are, and the light has either
been kept or it has not.

The scientist copied the notebooks page by page during the summer. When she left, the keeper gave her a new,
empty \\ one. On its first page he had written the date, the height of the water, and a sentence about the sea
that she had \\ not read before.
"""

QUESTION = "What is the capital of France?"

SENTENCES = (
    "The keeper lights the lamp every evening.",
    "Each night the lighthouse is switched on by its guardian.",
    "Bread dough needs time to rise before it is baked.",
)
