"""A Hugging Face checkpoint as one more trainer, to compare an engine with: its tensors are offered whole, and read on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_refit_ext.client import raise_problems
from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.manifest import Manifest, Offer, TensorSpec, pack_offer, whole_tensors
from vllm_refit_ext.core.messages import PrepareReply
from vllm_refit_ext.core.placement import concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.core.table import unpack_placements
from vllm_refit_ext.wires.boxes import MODULUS, Content, Memory, as_bytes, sum_by_tensor
from vllm_refit_ext.wires.coded import ScaleMoves, sent_content

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn", "U8": "uint8"}
"""Element types of safetensors headers -> ours."""


class Checkpoint(Memory):
    """The safetensors files of `folder`. Raises ConfigError when there are none, or for an element type that no refit moves."""

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError:
            raise ConfigError(
                "safetensors files can't be read", where=str(folder), got="no package safetensors", do="pip install safetensors"
            ) from None
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError("no checkpoint is here", where=str(folder), wanted="files *.safetensors")
        self._files: dict[str, Any] = {}
        specs: dict[str, TensorSpec] = {}
        problems = []
        for file in files:
            opened: Any = safe_open(file, framework="pt", device="cpu")
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                entry = opened.get_slice(name)
                dtype = DTYPES.get(str(entry.get_dtype()))
                if dtype is None:
                    got, wanted = str(entry.get_dtype()), ", ".join(DTYPES)
                    problems.append(Problem("an element type that no refit moves", f"tensor {name!r}", got, wanted))
                    continue
                self._files[name] = opened
                specs[name] = TensorSpec(tuple(entry.get_shape()), dtype)
        if problems:
            raise ConfigError.of(problems)
        self.manifest = Manifest(specs)
        self._names = list(specs)
        self._last: tuple[int, torch.Tensor] | None = None

    def offer(self) -> bytes:
        """What `prepare_refit_info` takes."""
        return pack_offer(Offer(self.manifest, whole_tensors(self.manifest)))

    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of tensor number `buffer`, uint8 [nbytes]. One tensor is held at a time."""
        if self._last is None or self._last[0] != buffer:
            name = self._names[buffer]
            self._last = buffer, as_bytes(self._files[name].get_tensor(name).contiguous())
        return self._last[1]

    def digests(self, replies: list[PrepareReply]) -> dict[int, dict[str, str]]:
        """What each engine rank must hold, by rank and tensor, as hexadecimal text. replies: those to `offer`.

        Raises PlanError with the problems in the replies.
        """
        raise_problems(replies)
        targets = concatenate([unpack_placements(r.targets) for r in replies if r.targets is not None])
        plan = build_plan(self.manifest, whole_tensors(self.manifest), targets)
        found = {}
        for reply in replies:
            mine = plan.for_target(reply.rank)
            scales = ScaleMoves(mine)

            def content(move: int, mine: Any = mine, scales: ScaleMoves = scales) -> Content:
                return sent_content(mine, move, self, scales)

            total = sum_by_tensor(mine, range(len(mine)), content)
            found[reply.rank] = {name: f"{value % MODULUS:016x}" for name, value in total.items()}
        return found
