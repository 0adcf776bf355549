"""What a message says of itself: the number of the protocol that its sender speaks, and a checksum of its content."""

from __future__ import annotations

import hashlib

import msgspec

from vllm_refit_ext.core.errors import ConfigError

PROTOCOL = 4
"""Raised when a message changes so that an older peer would misread it. Peers with different numbers refuse each other."""


class Numbered(msgspec.Struct):
    """Any message, of which only the number is read. One without a number was written by hand for this protocol."""

    protocol: int = PROTOCOL


def check_protocol(number: int, where: str) -> None:
    """Raise ConfigError unless `number`, found in a message of a peer, is ours."""
    if number != PROTOCOL:
        do = "install the same version of this project on both sides"
        raise ConfigError("the peer speaks another protocol", where=where, got=number, wanted=PROTOCOL, do=do)


def checksum(message: msgspec.Struct) -> str:
    """16 hexadecimal digits of the sha256 of all fields of `message` but `checksum`."""
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(message, checksum=""))).hexdigest()[:16]


def check_unchanged(message: msgspec.Struct, where: str) -> None:
    """Raise ConfigError when `message` is not what its sender summed up. A message without a checksum passes."""
    made: str = getattr(message, "checksum")  # noqa: B009 - any message that has one
    if made and made != (got := checksum(message)):
        do = "send the message as it was made; one that is written by hand has no checksum"
        raise ConfigError("the message was changed after it was made", where=where, got=got, wanted=made, do=do)
