"""Quantities with units: values that are read or refused; printing inverts reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hap.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_seconds,
    parse,
    unit_scales,
)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("16 GiB", "bytes", 2**34),
        ("16GB", "bytes", 16e9),
        ("10 Gbit/s", "bytes/s", 1.25e9),
        ("10.4 Gbps", "bytes/s", 1.3e9),
        ("10 Gb/s", "bytes/s", 1.25e9),
        ("300 GB/s", "bytes/s", 300e9),
        ("1 GiB/s", "bytes/s", 2**30),
        ("30 us", "seconds", 30e-6),
        ("30\u00b5s", "seconds", 30e-6),
        ("30\u03bcs", "seconds", 30e-6),
        ("1.5e3 ns", "seconds", 1.5e-6),
        ("14 TFLOP/s", "flop/s", 14e12),
        ("40 GFLOPS", "flop/s", 40e9),
    ],
)
def test_reads_what_people_write(text: str, dimension: str, value: float) -> None:
    assert parse(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension", "complaint"),
    [
        ("10", "bytes/s", "no unit"),
        (10, "bytes/s", "no unit"),
        ("10 Gbit", "bytes/s", "not a unit of bytes/s"),
        ("10 gbit/s", "bytes/s", "not a unit"),  # 'g' is ambiguous: grams, giga?
        ("16 Gb", "bytes", "not a unit"),  # memory is not given in bits
        ("fast", "bytes/s", "not a quantity"),
        ("1.2.3 GB/s", "bytes/s", "not a quantity"),
        (None, "seconds", "not a quantity"),
        ("1e400 GiB", "bytes", "too large a number"),  # no float
        ("1e999999 GiB", "bytes", "too large a number"),  # no product of decimals
        ("30 GB/s", "seconds", "not a unit of seconds"),
    ],
)
def test_refuses_and_shows_an_example(text: object, dimension: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        parse(text, dimension)
    assert "write for example" in str(caught.value)


@pytest.mark.parametrize("dimension", ["bytes", "bytes/s", "flop/s", "seconds"])
def test_every_unit_is_read_at_its_size(dimension: str) -> None:
    for unit, size in unit_scales(dimension).items():
        assert parse(f"3 {unit}", dimension) == float(3 * size)


@pytest.mark.parametrize(
    ("dimension", "show", "low"),
    [
        ("bytes", format_bytes, 1.0),
        ("bytes/s", format_bandwidth, 1.0),
        ("flop/s", format_flops, 1.0),
        ("seconds", format_seconds, 1e-9),
    ],
)
@given(exponent=st.floats(0, 12))
def test_printed_figures_read_back(dimension, show, low, exponent) -> None:
    value = low * 10**exponent
    assert parse(show(value), dimension) == pytest.approx(value, rel=6e-3)


def test_three_digits_and_no_exponent() -> None:
    assert format_bytes(2**34) == "16 GiB"
    assert format_bandwidth(1.25e9) == "1.25 GB/s"
    assert format_bandwidth(999.96e9) == "1 TB/s"
    assert format_seconds(0) == "0 ns"
