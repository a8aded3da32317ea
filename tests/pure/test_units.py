"""Quantities: formatted, parsed, and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.errors import PlanError
from autopipe.units import (
    GIB,
    MIB,
    as_size_option,
    in_bandwidth,
    in_bytes,
    in_bytes_rounded_up,
    in_distinct_bytes,
    in_gib,
    in_seconds,
    in_short_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.50 KiB"), (20 * 2**20, "20.0 MiB"), (150 * 2**30, "150 GiB")],
)
def test_bytes_have_three_digits_and_a_unit(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.25, "1.25 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.50 us"), (5e-9, "5 ns"), (120, "120 s")],
)
def test_seconds_have_three_digits_and_a_unit(seconds, text):
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 KiB"), (13.7 * MIB, "13.7 MiB"), (GIB, "1 GiB"), (1000 * MIB, "1000 MiB"), (1234.6 * GIB, "1,235 GiB")],
)
def test_short_sizes_have_no_trailing_zeros(count, text):
    assert in_short_bytes(count) == text


def test_distinct_sizes_have_the_digits_that_tell_them_apart():
    assert in_distinct_bytes(13.7e6 + 50, 13.7e6) == ("13.0654 MiB", "13.0653 MiB")
    assert in_distinct_bytes(GIB, GIB) == ("1 GiB", "1 GiB")


def test_sizes_are_rounded_up_where_they_must_suffice():
    sizes = 1.2301 * GIB, 2 * MIB, 999.6 * MIB, 0
    assert [in_bytes_rounded_up(size) for size in sizes] == ["1.24 GiB", "2 MiB", "1000 MiB", "0 KiB"]


def test_a_size_as_an_option_is_rounded_down():
    assert [as_size_option(size) for size in (1.2399 * GIB, 10 * GIB, 700 * MIB)] == ["1.23GiB", "10GiB", "700MiB"]


@given(st.integers(1, 2**50))
def test_a_size_as_an_option_is_read_back_as_no_more(size):
    read = parse_bytes(as_size_option(size)) if as_size_option(size) != "0KiB" else 0
    assert read <= size + 1
    assert read >= size * 0.99 or size < 1024


def test_one_decimal_of_gib():
    assert [in_gib(size) for size in (23.46 * GIB, 100 * MIB)] == ["23.5 GiB", "0.1 GiB"]


def test_bandwidths_are_decimal():
    assert [in_bandwidth(rate) for rate in (1e10, 1.25e9, 2e12)] == ["10 GB/s", "1.25 GB/s", "2000 GB/s"]
    assert in_bandwidth(3.3504e12, 4) == "3350 GB/s"


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GiB", 80 * 2**30), ("16 GB", 16 * 10**9), ("1.5MiB", 3 * 2**19), ("512B", 512), ("2e3kB", 2 * 10**6)],
)
def test_sizes_are_parsed(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("10GB/s", 1e10), ("400Gbit/s", 5e10), ("25Gbps", 3.125e9), ("1GiB/s", 2.0**30), ("8bit/s", 1.0)],
)
def test_bandwidths_are_parsed(text, value):
    assert parse_bandwidth(text) == value


def test_times_are_parsed():
    assert [parse_seconds(text) for text in ("5us", "1.5 ms", "2s", "7ns")] == [5e-6, 1.5e-3, 2.0, 7e-9]


@pytest.mark.parametrize(
    ("call", "text", "message"),
    [
        (parse_bytes, "80", "'80' has no unit"),
        (parse_bytes, "80Gib", "unknown unit 'Gib'"),
        (parse_bytes, "lots", "'lots' is not a size in bytes such as 16GiB"),
        (parse_bandwidth, "400Gbit", "Did you mean 'Gbit/s'"),
        (parse_seconds, "-1s", "'-1s' is not a time such as 5us"),
        (parse_bytes, 16, "16 is not a size in bytes"),
    ],
)
def test_a_quantity_without_a_known_unit_is_refused(call, text, message):
    with pytest.raises(PlanError, match=message):
        call(text)
