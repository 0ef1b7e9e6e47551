"""Other packages that compute the same recurrence, timed beside ours on the same inputs in the same run.

Each module adapts the public calls of one package, which must be installed; none of its code is here.
"""

from __future__ import annotations

from collections.abc import Callable

from gdn.bench.peers.peer import Peer, PeerRefused


def _flash_linear_attention() -> Peer:
    from gdn.bench.peers.flash_linear_attention import FlashLinearAttention

    return FlashLinearAttention()


def _flash_infer() -> Peer:
    from gdn.bench.peers.flash_infer import FlashInfer

    return FlashInfer()


PEERS: dict[str, Callable[[], Peer]] = {"fla": _flash_linear_attention, "flashinfer": _flash_infer}


def load_peer(name: str) -> Peer:
    """Import a package. Raises PeerRefused where it, PyTorch or the call is not here."""
    try:
        return PEERS[name]()
    except PeerRefused:
        raise
    except Exception as error:  # a package that is there but broken raises whatever broke it
        reason = str(error).strip().partition("\n")[0]
        raise PeerRefused(f"it cannot be imported ({type(error).__name__}: {reason})") from error
