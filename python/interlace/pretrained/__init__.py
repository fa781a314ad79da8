"""Pretrained models on this machine: from a name to weights, tokenizer and a decoder with its cache."""

from interlace.pretrained.decoder import Decoder
from interlace.pretrained.models import Source, Words, load, load_words, prepare, settings_of
from interlace.pretrained.wheels import WheelError

__all__ = ["Decoder", "Source", "WheelError", "Words", "load", "load_words", "prepare", "settings_of"]
