"""Tuned PyTorch that works in tiles: memory linear in tokens, on any device."""
