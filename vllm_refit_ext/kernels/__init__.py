"""Moves executed on a device: copy, cast, quantise, shuffle, digest, each in one pass from its source to its final place.

Read `moves` (what a move is), `table` (build once, bind, launch), then `pack*` (moves to table rows), `torch_moves` (the same in
torch) and `jit/` (the Triton programs). `mxfp8` has thin functions on tensors, `verify` the check against the reference, `digest`
the digest without Triton. Nothing here imports Triton until a kernel is about to run.
"""
