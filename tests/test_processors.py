import os

import pytest

from medcil.processors import usable_cores


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000\n", None),
        ("50000 100000\n", 1),
        ("100000 100000\n", 1),
        ("99900000 100000\n", None),
        ("", None),
    ],
)
def test_a_quota_bounds_the_cores(tmp_path, content, expected):
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path / "cpu.max") == (expected or len(os.sched_getaffinity(0)))


def test_without_a_container_all_that_the_process_is_bound_to_count(tmp_path):
    every = os.sched_getaffinity(0)
    assert usable_cores(tmp_path / "absent") == len(every)
    os.sched_setaffinity(0, {min(every)})
    try:
        assert usable_cores(tmp_path / "absent") == 1
    finally:
        os.sched_setaffinity(0, every)
