"""`interlace families`: which families of models a split leaves right, tried on this machine. See `command`."""
