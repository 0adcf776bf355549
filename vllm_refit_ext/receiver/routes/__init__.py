"""Routes: where vLLM's own weight loaders put every checkpoint tensor, recorded once on tensors without storage."""
