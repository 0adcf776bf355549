"""Runnable examples. They use the two packages as any user would, plus `examples.support`."""
