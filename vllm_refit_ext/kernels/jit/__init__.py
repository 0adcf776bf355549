"""Triton programs. Imported only when a kernel is about to run, so that everything above works where Triton is absent."""
