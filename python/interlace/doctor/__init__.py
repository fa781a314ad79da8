"""`interlace doctor`: what was built, what the machine offers, which path each op will take and why."""
