"""Steps that are not taken since their loss or gradient is not finite: counted here, and ended when there are too many.

Every rank has the same sums and so takes the same decision without a further vote.
"""

from collections.abc import Callable

from conf.schema import TrainConfig


class BadSteps:
    """Applies ``train.nonfinite`` and ``train.max_skips``."""

    def __init__(self, config: TrainConfig) -> None:
        self.in_a_row = 0
        self._config = config

    def note(self, step: int, finite: bool, loss: float, norm: float, before_end: Callable[[], None]) -> None:
        """Count ``step``, which was skipped unless ``finite``; ``before_end`` is called before the error.

        Raises:
            ValueError: ``train.nonfinite=stop``, or more than ``train.max_skips`` skips in a row.
        """
        self.in_a_row = 0 if finite else self.in_a_row + 1
        stops = self._config.nonfinite == "stop"
        if finite or not (stops or self.in_a_row > self._config.max_skips):
            return
        before_end()
        what = f"step {step}: the loss is {loss} and the gradient norm {norm}"
        if stops:
            raise ValueError(f"{what}. train.nonfinite=stop ends the run here, before the update; skip would go on.")
        raise ValueError(
            f"{what}, for the {self.in_a_row}th step in a row; train.max_skips={self._config.max_skips}. "
            "Resume from the last checkpoint with a lower optimizer.lr."
        )
