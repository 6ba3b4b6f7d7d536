"""What holds for every test: no deadline per example, and a failing example comes with the line that repeats it.

Without a GPU the kernels run in triton's interpreter. Triton decides that when it is first imported, and transformers
imports it, so the variable is set here: pytest reads this file before any test. What needs triton's compiler takes it
out of the environment of a process of its own (kernels/test_ahead_of_time.py).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvstore",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.differing_executors],  # a contract's tests are run by every implementation
)
settings.load_profile("kvstore")

if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch: for small tensors, and where there are few cores, its threads wait for each other longer than they
    compute."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
