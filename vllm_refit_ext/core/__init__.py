"""The pure part: manifests, boxes, placements, plans, the MXFP8 reference, layouts and messages.

Imports numpy and msgspec only. Neither vLLM nor Megatron, torch or Triton is loaded by anything below this package.
"""
