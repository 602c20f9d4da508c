"""A disk that is full: no file of this process may grow beyond a size."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_at(num_bytes: int) -> Iterator[None]:
    """Inside, a write beyond ``num_bytes`` of any file is cut short or fails with ``OSError``, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
