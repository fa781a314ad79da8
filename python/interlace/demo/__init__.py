"""`interlace demo`: real weights, split and compared. See `command`."""
