"""`torchrun ... -m interlace.train` is `interlace train`."""

from interlace.train.command import train

train(prog_name="interlace train")
