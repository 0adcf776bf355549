"""Triton decides at import whether it interprets, so these tests have their own process (test_interpreter.py starts it)."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
