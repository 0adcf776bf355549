"""The second argument of `prepare_refit_info`: what the trainer would do about FP8."""

from __future__ import annotations

import msgspec

from vllm_refit_ext.core.errors import ConfigError


class Fp8Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """prequantize: the trainer can send MXFP8 values with their scales; the reply then names the tensors that it should."""

    prequantize: bool = False


def parse_fp8_config(value: object) -> Fp8Config:
    """Read `fp8_config`: None, or a mapping with the fields of `Fp8Config`. Raises ConfigError."""
    if value is None:
        return Fp8Config()
    try:
        return msgspec.convert(value, Fp8Config)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"fp8_config can't be read: {error}", where="prepare_refit_info", got=repr(value)[:80], wanted="{'prequantize': bool}"
        ) from None
