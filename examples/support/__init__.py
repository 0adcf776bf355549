"""What the examples and tests stand on: tiny models, Megatron on a CPU, and processes. No part of the product."""
