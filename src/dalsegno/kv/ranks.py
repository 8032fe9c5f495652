"""Reports of ranks: what every rank does for itself has ended when the last one has said so."""

__all__ = ["RankReports"]


class RankReports:
    """Which ranks have reported one thing; a second report of a rank changes nothing."""

    __slots__ = ("_missing",)

    def __init__(self, world_size: int) -> None:
        """Wait for ranks 0 to `world_size` - 1."""
        self._missing = set(range(world_size))

    def add(self, rank: int) -> bool:
        """Note that a rank has reported; whether every rank has by now."""
        self._missing.discard(rank)
        return not self._missing

    def has(self, rank: int) -> bool:
        """Whether the rank has reported."""
        return rank not in self._missing
