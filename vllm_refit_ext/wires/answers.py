"""Replies of engine ranks to calls that return nothing, as vLLM's own weight-transfer calls do: through a store of the caller's.

The caller's message says under `ANSWER_TO` where it waits: `host:port/call`. Every rank leaves its reply there before it returns
or raises, so that the caller has all problems by name, whatever is left of them on the way that the call itself took.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any, NamedTuple

import msgspec

from vllm_refit_ext.core.errors import RefitError, WireError
from vllm_refit_ext.core.messages import Message, decoded, to_rpc
from vllm_refit_ext.core.table import MAX_RANKS
from vllm_refit_ext.wires.registry import Connection
from vllm_refit_ext.wires.rendezvous import open_store

logger = logging.getLogger(__name__)

ANSWER_TO = "answer_to"
NAME = re.compile(r"([0-9]{1,6})-([0-9]{1,6})-([0-9a-f]{16})")
"""Of a reply: the rank, the ranks of its engine, and a part that no other has."""
ANSWER_S = 10.0
"""Seconds within which the store takes a reply, and gives all of them."""


class _Name(NamedTuple):
    """What a reply is kept under. ranks: of its engine, so that one which is missing is missed."""

    rank: int
    ranks: int
    nonce: str

    @property
    def text(self) -> str:
        """As it stands in the store."""
        return f"{self.rank}-{self.ranks}-{self.nonce}"


class Answers:
    """The caller's half: it serves the store."""

    def __init__(self) -> None:
        """Raises WireError where no address can be listened on; see `rendezvous.open_store` for which it is."""
        host, port, self._serving = open_store("answers")
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._connection = Connection(self.address)

    def ask(self) -> str:
        """Where the replies to one call go, for its message."""
        return f"{self.address}/{secrets.token_hex(8)}"

    def take(self, to: str) -> list[dict[str, Any]]:
        """The replies to a call that has returned or raised, by rank. Raises WireError where ranks are missing."""
        _, _, call = to.rpartition("/")
        deadline = time.monotonic() + ANSWER_S

        def names(store: Any) -> list[_Name]:
            raw = bytes(store.get(call)).decode(errors="replace") if store.check([call]) else ""
            return sorted((_name(text) for text in raw.split()), key=lambda n: n.rank)

        def drop(store: Any) -> None:
            for key in (call, *(f"{call}/{n.text}" for n in found)):
                store.delete_key(key)

        found = self._connection.call(lambda store: store.call(names, deadline), deadline)
        missing = set(range(max((n.ranks for n in found), default=0))) - {n.rank for n in found}
        if missing or not found:
            raise WireError(
                "not every rank of the engine answered",
                where=f"the trainer's store at {self.address}",
                got=f"no reply of rank {', '.join(map(str, sorted(missing)))}" if found else "no reply",
                wanted="a reply of each rank",
                do="start vLLM with the backend `refit` of this version; where engines are on other hosts, set VLLM_REFIT_HOST "
                "on trainer rank 0 to an address of its host that they can reach",
            )
        keys = [f"{call}/{n.text}" for n in found]
        raw = [self._connection.call(lambda store, key=key: store.take(key, deadline), deadline) for key in keys]  # type: ignore[misc]
        self._connection.call(lambda store: store.call(drop, deadline), deadline)
        return [decoded(dict, r, f"reply of engine rank {n.rank}") for n, r in zip(found, raw, strict=True)]


def _name(text: str) -> _Name:
    """What an engine rank calls its reply. Raises WireError."""
    found = NAME.fullmatch(text)
    if found is None or not int(found[1]) < int(found[2]) <= MAX_RANKS:
        what, wanted = "a reply has a name that no engine rank gives", f"{NAME.pattern}, ranks up to {MAX_RANKS}"
        raise WireError(what, where="the trainer's store", got=text[:80], wanted=wanted)
    return _Name(int(found[1]), int(found[2]), found[3])


def answer(to: object, rank: int, ranks: int, reply: Message) -> None:
    """An engine rank's half: leave `reply` where the caller waits; nothing where it does not. Never raises: a rank that failed
    alone would put vLLM's replies out of order. The caller finds that it is missing, and the log says why.
    """
    if to is None:
        return
    name, deadline = _Name(rank, ranks, secrets.token_hex(8)).text, time.monotonic() + ANSWER_S
    address, _, call = str(to).rpartition("/")
    try:
        connection = Connection(address)
        connection.call(lambda store: store.put(f"{call}/{name}", msgspec.msgpack.encode(to_rpc(reply)), deadline), deadline)
        connection.call(lambda store: store.call(lambda raw: raw.append(call, f"{name} "), deadline), deadline)
    except RefitError as error:
        logger.warning("refit: rank %d could not answer the trainer: %s", rank, error)
