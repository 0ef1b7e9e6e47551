"""What a package must offer to be timed beside ours."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gdn.bench.timing import Spread
from gdn.bench.workload import Workload
from gdn.errors import GdnError


class PeerRefused(GdnError):
    """A package is absent, or has no public call for a case; the message says which in one line."""


class Peer(ABC):
    """Another package, ready to be timed."""

    name: str

    @abstractmethod
    def run(self, workload: Workload, repeats: int) -> tuple[str, Spread, dict[str, float]]:
        """Check and time the case of a workload on its inputs.

        Returns what was compared in a few words, the time of one call, and for a step the medians of its two parts.
        Raises PeerRefused for a case that the package has no call for, or whose results it gets wrong.
        """
