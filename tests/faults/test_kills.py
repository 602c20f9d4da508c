"""A killed rank costs nothing but time (``tests.faults.kills``): some rounds always, all with ``make faults``."""

from pathlib import Path

import pytest

from tests.faults.kills import ROUNDS, run_round

# each optimizer, both layouts, both kinds of save; the last one is restarted by torchrun
ALWAYS = (2, 4, 11)


@pytest.fixture(scope="session")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rounds share their unbroken runs."""
    return tmp_path_factory.mktemp("rounds")


@pytest.mark.parametrize("number", ALWAYS)
def test_a_killed_rank_costs_nothing(number: int, tokens: Path, rounds: Path):
    run_round(number, tokens, rounds)


@pytest.mark.faults
@pytest.mark.parametrize("number", [number for number in range(ROUNDS) if number not in ALWAYS])
def test_more_rounds(number: int, tokens: Path, rounds: Path):
    run_round(number, tokens, rounds)
