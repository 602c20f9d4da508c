"""What a start finds in a store that earlier starts have used, as torchrun's is under --max-restarts."""

import threading

import pytest
from torch.distributed import HashStore

from dist.group import fresh_store


def start(store: HashStore, ranks: list[int], world_size: int) -> dict[int, object]:
    """``fresh_store`` of each of ``ranks``, in threads: the store, or the error."""
    found: dict[int, object] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = fresh_store(store, rank, world_size, timeout_seconds=2.0)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def check_shared(joined: dict[int, object], value: str) -> None:
    """That these ranks have one store between them, with nothing in it yet."""
    assert not any(store.check([f"address{rank}"]) for store in joined.values() for rank in joined)
    for rank, store in joined.items():
        store.set(f"address{rank}", value)
    assert {store.get(f"address{rank}").decode() for store in joined.values() for rank in joined} == {value}


@pytest.mark.parametrize("world_size", [2, 4])
def test_nothing_of_an_earlier_start_is_seen(world_size: int):
    store = HashStore()
    check_shared(start(store, list(range(world_size)), world_size), "old")
    # the last rank looks before rank 0 has named the new start
    last: dict[int, object] = {}
    thread = threading.Thread(target=lambda: last.update(start(store, [world_size - 1], world_size)))
    thread.start()
    thread.join(0.2)
    others = start(store, list(range(world_size - 1)), world_size)
    thread.join()
    check_shared(others | last, "new")


def test_a_start_that_a_rank_never_joined_is_not_believed_later():
    store = HashStore()
    assert "ranks [2] did not come" in str(start(store, [0, 1], 3)[0])
    check_shared(start(store, [0, 1, 2], 3), "new")


def test_who_is_missing_is_said():
    found = start(HashStore(), [0], 3)[0]
    assert str(found) == (
        "ranks [1, 2] did not come to the start within parallel.timeout_seconds=2. "
        "Look at their nodes and logs; raise it if they only start later."
    )
