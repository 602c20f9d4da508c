"""Steps that must not be taken: their loss or gradient is not finite, or their loss jumps far above the last ones.

Found here before the update, with what then happens: the step is skipped, the run goes back to its last checkpoint, or
it ends. Every rank has the same sums and so takes the same decision without a further vote.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from conf.schema import TrainConfig

WINDOW = 64
# fewer losses say little about their spread
MIN_LOSSES = 16
# of the mean: losses that hardly differ make no jump out of nothing
MIN_SPREAD = 0.001


class RollBack(Exception):
    """The run must go back to its last checkpoint; the message is the reason."""


class BadSteps:
    """Applies ``train.nonfinite``, ``train.spike`` and their bounds; ``losses``: the last good ones that are known."""

    def __init__(self, config: TrainConfig, losses: Sequence[float] = ()) -> None:
        self._config = config
        self.losses: deque[float] = deque(losses, maxlen=WINDOW)
        """The last good losses: with them, a resumed run decides as the unbroken one."""
        self._in_a_row = 0
        self._policy = ""
        self._snapshot: int | None = None
        self._rollbacks = 0

    def judge(self, loss: float, norm: float) -> str | None:
        """Why the update of a step with this loss and gradient norm must not be made; None where it may."""
        config, reason = self._config, None
        if not (math.isfinite(loss) and math.isfinite(norm)):
            reason, self._policy = f"the loss is {loss} and the gradient norm {norm}", "nonfinite"
        elif config.spike != "off" and len(self.losses) >= MIN_LOSSES:
            mean = statistics.fmean(self.losses)
            spread = max(statistics.pstdev(self.losses, mean), MIN_SPREAD * abs(mean))
            if loss > mean + config.spike_sigmas * spread:
                distance = f"{(loss - mean) / spread:.1f} standard deviations above the last {len(self.losses)}"
                reason, self._policy = f"the loss is {loss:.4f}, {distance} (mean {mean:.4f})", "spike"
        if reason is None:
            self._in_a_row = 0
            self.losses.append(loss)
        return reason

    def act(self, step: int, reason: str, before_end: Callable[[], None]) -> None:
        """Do what the configuration wants after ``step`` was left out for ``reason``; returns where it is skipped.

        ``before_end`` is called before an error ends the run.

        Raises:
            RollBack: the policy is ``rollback``.
            ValueError: it is ``stop``, or more than ``train.max_skips`` steps in a row are skipped.
        """
        self._in_a_row += 1
        key = f"train.{self._policy}"
        policy = self._config.nonfinite if self._policy == "nonfinite" else self._config.spike
        if policy == "rollback":
            raise RollBack(f"step {step}: {reason}")
        if policy == "skip" and self._in_a_row <= self._config.max_skips:
            return
        before_end()
        if policy == "stop":
            raise ValueError(
                f"step {step}: {reason}. {key}=stop ends the run here, before the update; skip would go on."
            )
        raise ValueError(
            f"step {step}: {reason}, for the {self._in_a_row}th step in a row; train.max_skips="
            f"{self._config.max_skips}. Resume from the last checkpoint with a lower optimizer.lr."
        )

    def rolled_back(self, snapshot: int, losses: Sequence[float], reason: str) -> None:
        """The run is at the checkpoint of step ``snapshot`` again, with its ``losses``.

        Raises:
            ValueError: more than ``train.max_rollbacks`` times to this one.
        """
        self._rollbacks = self._rollbacks + 1 if snapshot == self._snapshot else 1
        self._snapshot, self._in_a_row = snapshot, 0
        self.losses = deque(losses, maxlen=WINDOW)
        if self._rollbacks > self._config.max_rollbacks:
            raise ValueError(
                f"{reason}, after {self._rollbacks - 1} returns to the checkpoint of step {snapshot} already; "
                f"train.max_rollbacks={self._config.max_rollbacks}. Resume from an earlier checkpoint "
                "(checkpoint.resume=STEP) or with a lower optimizer.lr."
            )
