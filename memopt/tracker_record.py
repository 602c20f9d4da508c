"""What a memory tracker writes down: bytes by owner, how high they went and when.

Decided here: a high mark belongs to the stretch of time between two changes of phase, markers or step. It counts for
everything that was open in that stretch, and it starts at what was held when the stretch began. The timeline is the
list of these marks: a point is the moment of most bytes of its stretch.
"""

from collections import Counter
from dataclasses import dataclass

OWNERS = ("parameters", "gradients", "optimizer_state", "activations", "loss", "communication", "other")
"""Who bytes can belong to, in the order of a stacked plot."""

# a stretch without any change of phase ends after this many operations, more as the timeline gets long
FIRST_STRIDE = 4


@dataclass(frozen=True)
class Moment:
    """Bytes held at one moment."""

    step: int
    phase: str | None
    """The phase that was open; None outside of any."""
    owners: dict[str, int]
    """Bytes of each of ``OWNERS``."""

    @property
    def total(self) -> int:
        """Bytes of all owners together."""
        return sum(self.owners.values())


class Record:
    """Bytes by owner and their high marks. Knows nothing of tensors.

    Args:
        points: the timeline keeps at most this many, from 2; neighbours are merged to the higher one.
    """

    def __init__(self, points: int) -> None:
        if points < 2:
            raise ValueError(f"points={points} keeps no timeline. Use 2 or more, for example 2000.")
        self.total = 0
        self._bytes = [0] * len(OWNERS)
        self._step = 0
        self._phase: str | None = None
        self._markers: Counter[str] = Counter()
        self._points = points
        self._timeline: list[Moment] = []
        self._stride = FIRST_STRIDE
        self._peaks: dict[tuple[str | None, str | None], Moment] = {}
        self._peak: Moment | None = None
        self._marks = list(self._bytes)
        self._high = 0
        self._operations = 0

    def add(self, owner: int, size: int) -> None:
        """``size`` bytes more (or less, if negative) of the owner with this index. Safe in a finaliser."""
        self._bytes[owner] += size
        self.total += size

    def move(self, old: int, new: int, size: int) -> None:
        """``size`` bytes change their owner."""
        self._bytes[old] -= size
        self._bytes[new] += size

    def note(self) -> None:
        """An operation is over: what is held now is a moment that counts."""
        if self.total > self._high:
            self._high = self.total
            # into memory that exists: an allocation can run the garbage collector, and that our finalisers
            self._marks[:] = self._bytes
        self._operations += 1
        if self._operations >= self._stride:
            self._end_stretch()

    @property
    def phase(self) -> str | None:
        """The phase that is open."""
        return self._phase

    def set_phase(self, phase: str | None) -> None:
        """From here on it is this phase; markers that are open end with the one before."""
        self._end_stretch()
        self._phase = phase
        self._markers.clear()

    def set_step(self, step: int) -> None:
        """From here on it is this step."""
        self._end_stretch()
        self._step = step

    def open_marker(self, name: str) -> None:
        """From here on high marks count for this marker too. It may be opened several times."""
        self._end_stretch()
        self._markers[name] += 1

    def close_marker(self, name: str) -> None:
        """Undo one ``open_marker``; nothing if a phase has ended it."""
        self._end_stretch()
        self._markers[name] -= 1
        self._markers += Counter()

    def now(self) -> Moment:
        """What is held now."""
        return self._moment(self._bytes)

    @property
    def peak(self) -> Moment:
        """The moment of most bytes so far."""
        self._end_stretch()
        assert self._peak is not None
        return self._peak

    @property
    def peaks(self) -> dict[tuple[str | None, str | None], Moment]:
        """(phase, marker) -> the moment of most bytes while both were open; marker None: whole phase."""
        self._end_stretch()
        return dict(self._peaks)

    @property
    def timeline(self) -> list[Moment]:
        """Moments in the order of time, their highest among them."""
        self._end_stretch()
        return list(self._timeline)

    def forget_peaks(self) -> None:
        """Peaks start anew at what is held now; the timeline goes on."""
        self._end_stretch()
        self._peaks.clear()
        self._peak = None

    def _begin_stretch(self) -> None:
        self._operations = 0
        self._marks[:] = self._bytes
        self._high = sum(self._marks)

    def _end_stretch(self) -> None:
        moment = self._moment(self._marks)
        total = moment.total
        if self._peak is None or total > self._peak.total:
            self._peak = moment
        for marker in (None, *self._markers):
            best = self._peaks.get((self._phase, marker))
            if best is None or total > best.total:
                self._peaks[self._phase, marker] = moment
        self._draw(moment)
        self._begin_stretch()

    def _draw(self, moment: Moment) -> None:
        line = self._timeline
        if line and line[-1] == moment:
            return
        line.append(moment)
        if len(line) > self._points:
            pairs = [line[start : start + 2] for start in range(0, len(line), 2)]
            self._timeline = [max(pair, key=lambda point: point.total) for pair in pairs]
            self._stride *= 2

    def _moment(self, values: list[int]) -> Moment:
        return Moment(self._step, self._phase, dict(zip(OWNERS, values, strict=True)))
