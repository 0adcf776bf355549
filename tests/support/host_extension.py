"""An engine whose workers play hosts. Apart from the trainers' jobs, which would import vLLM with it."""

from __future__ import annotations

import os

from tests.support.plain_cpu import PlainCpuExtension
from vllm_refit_ext.core.hosts import HOST_ID


class HostExtension(PlainCpuExtension):
    """The plain CPU engine, whose workers can be placed on any host they are."""

    def refit_play(self, hosts: str) -> str:
        """Play host `hosts[rank]`."""
        os.environ[HOST_ID] = hosts[self.refit_status()["rank"]]
        return os.environ[HOST_ID]
