"""What this process takes, as the system tells it."""

from offspec.core import memory


def test_this_process_has_a_size() -> None:
    assert 10**6 < memory.resident_bytes() <= memory.peak_bytes() < 10**12
    assert memory.available_bytes() > 10**6
    memory.trim()
