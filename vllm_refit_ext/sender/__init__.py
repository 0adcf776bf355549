"""The trainer's side of a refit, for any trainer. vLLM is not needed here."""
