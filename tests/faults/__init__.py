"""Ranks that die, raise, disagree, are late or get signals: everyone learns of it, nobody hangs, nothing
is left."""
