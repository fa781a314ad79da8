"""Tests of interlace: pure tests first, then processes on one host, then devices."""
