"""An engine whose workers play hosts. Apart from the trainers' jobs, which would import vLLM with it."""

from __future__ import annotations

import os

from tests.support.plain_cpu import PlainCpuExtension
from vllm_refit_ext.core.sites import SITE


class SiteExtension(PlainCpuExtension):
    """The plain CPU engine, whose workers can be told on which site they are."""

    def refit_play(self, sites: str) -> str:
        """Play site `sites[rank]`."""
        os.environ[SITE] = sites[self.refit_status()["rank"]]
        return os.environ[SITE]
