"""The exact hit, by brute force over token tuples: what DESIGN promises when memory never runs out.

Nothing here shares code with the cache: a prefix is the tuple of its tokens, a boundary is tried by counting down.
"""

from collections.abc import Sequence


class HitOracle:
    """Remembers every prefix whose attention was computed and every prefix a state was kept at."""

    def __init__(self, unit: int, interval: int, *, has_state: bool) -> None:
        self.unit = unit
        self.interval = interval
        self.has_state = has_state
        self.attention: set[tuple[int, ...]] = set()
        self.states: set[tuple[int, ...]] = set()

    def hit(self, prompt: Sequence[int]) -> int:
        """The largest boundary of at most n-1 tokens with all attention below it and a state at it."""
        for boundary in range(len(prompt) - 1, 0, -1):
            has_state = not self.has_state or tuple(prompt[:boundary]) in self.states
            if boundary % self.unit == 0 and has_state and self._has_attention(prompt, boundary):
                return boundary
        return 0

    def learn(self, prompt: Sequence[int], answer: Sequence[int], marks: Sequence[int] = ()) -> None:
        """Remember what serving `prompt` with `answer` leaves behind; the last answer token is never computed."""
        hit = self.hit(prompt)
        junction = max((b for b in range(0, len(prompt), self.unit) if self._has_attention(prompt, b)), default=0)
        tokens = [*prompt, *answer][:-1]
        n = len(prompt)
        kept = {(n - 1) // self.unit * self.unit, junction}
        kept |= {mark // self.unit * self.unit for mark in marks if mark <= n}
        if n % self.unit == 0:
            kept.add(n)
        if self.interval:
            last = len(tokens) // self.interval * self.interval
            kept |= {last} if last > n else set()
        self.states |= {tuple(tokens[:boundary]) for boundary in kept if boundary > hit}
        self.attention |= {tuple(tokens[:b]) for b in range(self.unit, len(tokens) + 1, self.unit)}

    def _has_attention(self, prompt: Sequence[int], boundary: int) -> bool:
        return all(tuple(prompt[:b]) in self.attention for b in range(self.unit, boundary + 1, self.unit))
