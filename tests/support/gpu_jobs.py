"""A trainer process for GPU tests that ends in the middle of a refit.

python -m tests.support.gpu_jobs URL FOLDER        packs a few buckets for the engine at URL, then dies
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.support.loose_sender import LooseSender
from vllm_refit_ext.client import HTTPClient


def die_while_packing(url: str, folder: str) -> None:
    """Prepare, begin a refit in small buckets, and end without a word after the fourth."""
    given = {n: t.cuda() for path in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(path).items()}
    sender = LooseSender(HTTPClient(url), given, wire_name="ring", deadline_s=60, bucket_bytes=100_000)
    sender.prepare()
    pack = sender._sender._gather.pack

    def fail(number: int, message: object) -> None:
        if number == 4:
            os._exit(9)
        pack(number, message)

    sender._sender._gather.pack = fail
    sender.refit("never")


if __name__ == "__main__":
    die_while_packing(*sys.argv[1:3])
