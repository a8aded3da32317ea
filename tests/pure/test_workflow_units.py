"""Sizes, rates and times as people write them."""

import pytest

from autopipe.workflow.units import parse_bytes, parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        ("16GB", 16 * 10**9),
        ("1.5 MiB", 1572864),
        ("512", 512),
        ("2k", 2000),
        ("80gib", 80 * 2**30),
    ],
)
def test_a_size_is_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25Gbit/s", 3.125e9),
        ("10GB/s", 1e10),
        ("1GiB/s", 2**30),
        ("100Gbps", 1.25e10),
        ("8bit/s", 1.0),
        ("1.25GB/s", 1.25e9),
    ],
)
def test_a_rate_is_bytes_per_second(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("5us", 5e-6), ("0.2ms", 2e-4), ("1s", 1.0), ("7 ns", 7e-9)])
def test_a_time_is_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("parse", "text", "shown"),
    [
        (parse_bytes, "24 apples", "write 24GiB, 16GB or 512MiB"),
        (parse_bytes, "GiB", "not a number with a unit"),
        (parse_bytes, "-1GiB", "not a number with a unit"),
        (parse_rate, "25G", "write 25Gbit/s or 10GB/s"),
        (parse_rate, "10GB/h", "write 25Gbit/s or 10GB/s"),
        (parse_rate, "0GB/s", "write 25Gbit/s or 10GB/s"),
        (parse_seconds, "5", "write 5us, 0.2ms or 1s"),
    ],
)
def test_what_is_no_such_thing_is_answered_with_the_forms(parse, text, shown):
    with pytest.raises(ValueError, match=shown):
        parse(text)
