"""Routes: where vLLM's own weight loaders put every checkpoint tensor, recorded once on tensors without storage."""

from vllm_refit_ext.receiver.routes.record import record_routes
from vllm_refit_ext.receiver.routes.table import Routes

__all__ = ["Routes", "record_routes"]
