"""Stored formats: what is rounded, what survives exactly, and what encodes to the same bits
again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fused_offload.kernels.formats import (
    BF16,
    BF16_STOCHASTIC,
    FP16,
    FP16_NONZERO,
    FP32,
    LOG8,
    REMAINDER,
    ROOT8,
    SCALE_GROUP,
    Format,
    Rounding,
    Stored,
    decode,
    encode_,
    join_remainder,
    rounding_counter,
    rounding_thresholds,
    split_remainder_,
)

SCALED = pytest.mark.parametrize("format", [FP16, FP16_NONZERO], ids=["fp16", "fp16_nonzero"])
VALUE_FORMATS = pytest.mark.parametrize(
    "format", [FP32, BF16, FP16, FP16_NONZERO], ids=["fp32", "bf16", "fp16", "fp16_nonzero"]
)
ALL_FORMATS = pytest.mark.parametrize(
    "format",
    [FP32, BF16, FP16, FP16_NONZERO, ROOT8, LOG8],
    ids=["fp32", "bf16", "fp16", "fp16_nonzero", "root8", "log8"],
)
STOCHASTIC = pytest.mark.parametrize("format", [BF16_STOCHASTIC, ROOT8, LOG8], ids=lambda format: format.name)


def empty(format: Format, numel: int) -> Stored:
    # Sentinels, not zeros: an element or a scale that nobody writes must show.
    data = torch.full((numel,), 77, dtype=format.dtype)
    return Stored(format, data, torch.full((-(-numel // SCALE_GROUP),), 77.0) if format.scaled else None)


def encoded(format: Format, values: torch.Tensor, thresholds: torch.Tensor | None = None) -> Stored:
    stored = empty(format, values.numel())
    encode_(stored, values, thresholds)
    return stored


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(stored: Stored, other: Stored) -> None:
    assert torch.equal(bits(stored.data), bits(other.data))
    assert (stored.scale is None) == (other.scale is None)
    if stored.scale is not None and other.scale is not None:
        assert torch.equal(bits(stored.scale), bits(other.scale))


def random_fp32(numel: int) -> torch.Tensor:
    """Uniformly random bit patterns: every exponent, subnormals, infinities and NaNs of both
    signs.
    """
    return torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, numel, dtype=np.uint32).view(np.float32))


def wide_values(numel: int, seed: int = 0) -> torch.Tensor:
    """Finite values of both signs over 2^-149 to 2^126, far from each other within every block."""
    random = np.random.default_rng(seed)
    values = np.ldexp(random.uniform(-2, 2, numel), random.integers(-149, 126, numel))
    return torch.from_numpy(values.astype(np.float32))


def bf16_bits_by_hand(values: torch.Tensor) -> np.ndarray:
    """Nearest even of finite or infinite values, from the distances to both neighbours in
    float64.
    """
    wide = values.numpy().astype(np.float64)
    low = (values.numpy().view(np.uint32) >> 16).astype(np.uint32)

    def value_of(high: np.ndarray) -> np.ndarray:
        finite = (high << 16).view(np.float32).astype(np.float64)
        # Beyond the largest bf16 comes 2^128, which stands for infinity when rounding.
        return np.where(np.isinf(finite), np.copysign(2.0**128, finite), finite)

    to_low, to_high = np.abs(wide - value_of(low)), np.abs(value_of(low + 1) - wide)
    up = (to_high < to_low) | ((to_high == to_low) & (low & 1 == 1))
    return np.where(np.isinf(wide), low, low + up).astype(np.uint16).view(np.int16)


def test_bf16_rounds_to_the_nearest_even() -> None:
    values = random_fp32(200_000)
    ties = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16 | 0x8000
    values = torch.cat([values, ties.view(torch.float32)])
    values = values[~values.isnan()]
    assert np.array_equal(bits(encoded(BF16, values).data).numpy(), bf16_bits_by_hand(values))


def test_nan_stays_nan_in_every_format() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)
    for format in (FP32, BF16, FP16, FP16_NONZERO, ROOT8, LOG8):
        assert decode(encoded(format, patterns.view(torch.float32))).isnan().all(), format


@VALUE_FORMATS
def test_what_a_format_can_represent_is_exact(format: Format) -> None:
    values = torch.randint(-1023, 1024, (640,)).float() * 2.0**-20
    values = values.to(torch.bfloat16).float() if format is BF16 else values
    assert torch.equal(decode(encoded(format, values)), values)


def test_fp32_keeps_every_bit() -> None:
    values = random_fp32(10_000)
    stored = encoded(FP32, values)
    assert torch.equal(bits(stored.data), bits(values))
    assert torch.equal(bits(decode(stored)), bits(values))


@SCALED
def test_scales_put_the_largest_magnitude_below_2_to_the_15(format: Format) -> None:
    values = wide_values(300 * SCALE_GROUP)
    stored = encoded(format, values)
    assert stored.scale is not None
    mantissas, _ = np.frexp(stored.scale.numpy())
    assert (mantissas == 0.5).all()
    top = stored.data.view(-1, SCALE_GROUP).float().abs().amax(dim=1)
    at_the_floor = stored.scale == 2.0**-126
    assert ((top >= 2.0**14) | at_the_floor).all()
    assert (top < 2.0**15).all()
    assert not at_the_floor.all()


@SCALED
def test_scaled_elements_are_rounded_to_the_nearest_even(format: Format) -> None:
    values = wide_values(300 * SCALE_GROUP).abs()
    # Ties between neighbouring fp16 numbers, in blocks whose scale is 1.
    values[:SCALE_GROUP] = 2.0**14 + 8 * torch.arange(SCALE_GROUP)
    stored = encoded(format, values)
    assert stored.scale is not None
    # numpy rounds float64 to float16 correctly, and dividing by a power of two is exact in float64.
    quotient = values.double().numpy() / stored.scale.double().repeat_interleave(SCALE_GROUP).numpy()
    expected = quotient.astype(np.float16)
    if format.keep_nonzero:
        expected[(expected == 0) & (quotient > 0)] = 2.0**-24
    assert np.array_equal(stored.data.numpy().view(np.int16), expected.view(np.int16))


@SCALED
def test_error_within_a_block_of_huge_range(format: Format) -> None:
    # 22 decades in one block: relative error while the value is a normal fp16 number, absolute
    # error below.
    values = torch.logspace(-20, 2, SCALE_GROUP)
    stored = encoded(format, values)
    assert stored.scale is not None
    step = stored.scale[0].double() * 2.0**-24  # smallest fp16 number in units of the values
    largest_error = step if format.keep_nonzero else step / 2
    error = (decode(stored).double() - values.double()).abs()
    assert (error <= torch.maximum(values.double() * 2.0**-11, largest_error)).all()
    assert error.max() > 0


def test_positive_second_moments_never_become_zero() -> None:
    values = torch.logspace(-44, 4, SCALE_GROUP)
    assert (values > 0).all()
    assert (decode(encoded(FP16_NONZERO, values)) > 0).all()
    # Without the rule they do, so the values above are small enough to need it.
    assert (decode(encoded(FP16, values)) == 0).any()


def test_zero_second_moments_stay_zero() -> None:
    values = torch.zeros(2 * SCALE_GROUP)
    values[SCALE_GROUP] = 1e4
    assert torch.equal(decode(encoded(FP16_NONZERO, values)), values)


@SCALED
def test_blocks_of_zeros_and_subnormals_have_the_smallest_scale(format: Format) -> None:
    # The scale stops at the smallest normal number, whose reciprocal is exact; there fp16 holds all
    # that is left.
    values = torch.cat([torch.zeros(SCALE_GROUP), torch.arange(SCALE_GROUP).float() * 2.0**-149])
    stored = encoded(format, values)
    assert stored.scale is not None
    assert stored.scale.tolist() == [2.0**-126, 2.0**-126]
    assert torch.equal(bits(decode(stored)), bits(values))


@ALL_FORMATS
def test_encoding_what_was_decoded_gives_the_same_bits(format: Format) -> None:
    values = wide_values(2000 * SCALE_GROUP + 17)
    values = values.abs() if format.name == "log8" else values
    stored = encoded(format, values)
    assert_same_bits(encoded(format, decode(stored)), stored)


@SCALED
def test_maxima_that_round_up_to_a_power_of_two_encode_to_the_same_bits(format: Format) -> None:
    # One float32 below, at, and one above the tie between 2^15 - 16 and 2^15 (in units of the
    # scale): a scale taken from the unrounded maximum would double at the second encoding and cost
    # small neighbours their last bit.
    tie = torch.tensor([2.0 - 2.0**-11], dtype=torch.float32)
    for nudge in (-1, 0, 1):
        maximum = (bits(tie) + nudge).view(torch.float32)
        small = torch.arange(1, SCALE_GROUP, dtype=torch.float32) * 2.0**-38
        stored = encoded(format, torch.cat([maximum, small]))
        assert_same_bits(encoded(format, decode(stored)), stored)


@SCALED
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("magnitude", [1.0, 1e-20, 1e-38])
def test_infinities_and_nans_cost_their_neighbours_nothing(format: Format, value: float, magnitude: float) -> None:
    values = (torch.rand(2 * SCALE_GROUP) + 1e-3) * magnitude
    clean = encoded(format, values)
    values[5] = value
    values[SCALE_GROUP + 127] = value
    spoilt = encoded(format, values)
    hit = torch.zeros(values.numel(), dtype=torch.bool)
    hit[[5, SCALE_GROUP + 127]] = True
    assert torch.equal(decode(spoilt)[hit].nan_to_num(1.0, 2.0, 3.0), values[hit].nan_to_num(1.0, 2.0, 3.0))
    # The spoilt elements were not the largest of their blocks, so the scales, and all other values,
    # are as before.
    assert torch.equal(bits(spoilt.data)[~hit], bits(clean.data)[~hit])
    assert (spoilt.scale is None) == (clean.scale is None)
    if spoilt.scale is not None and clean.scale is not None:
        assert torch.equal(spoilt.scale, clean.scale)


@pytest.mark.gpu
@ALL_FORMATS
def test_a_gpu_encodes_and_decodes_the_same_bits(format: Format) -> None:
    values = torch.cat([random_fp32(2**16), wide_values(2**16), torch.rand(1000)]).abs()
    values = values.where(~values.isnan(), 1.0)  # the one thing whose bits differ
    on_cpu, on_gpu = encoded(format, values), empty(format, values.numel())
    on_gpu = on_gpu._replace(data=on_gpu.data.cuda(), scale=None if on_gpu.scale is None else on_gpu.scale.cuda())
    encode_(on_gpu, values.cuda())
    back = on_gpu._replace(data=on_gpu.data.cpu(), scale=None if on_gpu.scale is None else on_gpu.scale.cpu())
    assert_same_bits(back, on_cpu)
    assert torch.equal(bits(decode(on_gpu).cpu()), bits(decode(on_cpu)))


@ALL_FORMATS
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 255, 3 * 128 + 17])
def test_partial_last_block(format: Format, numel: int) -> None:
    whole = -(-numel // SCALE_GROUP) * SCALE_GROUP
    values = torch.zeros(whole)
    values[:numel] = wide_values(numel, seed=numel).abs()
    stored, padded = encoded(format, values[:numel]), encoded(format, values)
    assert_same_bits(stored, padded.narrow(0, numel))
    assert torch.equal(decode(stored), decode(padded)[:numel])


@ALL_FORMATS
def test_a_narrowed_run_is_the_same_memory(format: Format) -> None:
    stored = encoded(format, wide_values(5 * SCALE_GROUP).abs())
    middle = stored.narrow(2 * SCALE_GROUP, SCALE_GROUP + 9)
    assert torch.equal(decode(middle), decode(stored)[2 * SCALE_GROUP : 3 * SCALE_GROUP + 9])
    before = decode(stored)
    encode_(middle, torch.full((SCALE_GROUP + 9,), 0.5))
    after = decode(stored)
    assert (after[2 * SCALE_GROUP : 3 * SCALE_GROUP + 9] == 0.5).all()
    assert torch.equal(after[: 2 * SCALE_GROUP], before[: 2 * SCALE_GROUP])
    assert torch.equal(after[4 * SCALE_GROUP :], before[4 * SCALE_GROUP :])


def test_narrowing_twice_adds_up() -> None:
    stored = encoded(FP16, wide_values(6 * SCALE_GROUP))
    twice = stored.narrow(SCALE_GROUP, 4 * SCALE_GROUP).narrow(2 * SCALE_GROUP, SCALE_GROUP + 1)
    once = stored.narrow(3 * SCALE_GROUP, SCALE_GROUP + 1)
    assert_same_bits(twice, once)
    assert once.scale is not None
    assert once.scale.numel() == 2


def test_decode_writes_where_it_is_told() -> None:
    stored = encoded(FP16, wide_values(SCALE_GROUP + 3))
    out = torch.full((SCALE_GROUP + 3,), 9.0)
    assert decode(stored, out) is out
    assert torch.equal(out, decode(stored))


def test_stored_bytes_count_scales() -> None:
    assert [format.stored_bytes(256) for format in (FP32, BF16, FP16, REMAINDER, LOG8)] == [1024, 512, 520, 512, 264]


# -- 8 bits and stochastic rounding ----------------------------------------------------------------


def thresholds(numel: int, *, seed: int = 0, step: int = 1, counter: int = 0, moment: int = 0) -> torch.Tensor:
    return rounding_thresholds(Rounding(seed, step, counter), numel, torch.device("cpu"))[moment]


def narrow_values(format: Format, numel: int) -> torch.Tensor:
    """Values over five decades; not negative where the format takes no others."""
    random = np.random.default_rng(0)
    values = torch.from_numpy((random.normal(size=numel) * 10 ** random.uniform(-5, 0, numel)).astype(np.float32))
    return values.abs() if format is LOG8 else values


@STOCHASTIC
def test_stochastic_rounding_is_right_on_average(format: Format) -> None:
    values, trials = narrow_values(format, SCALE_GROUP), 4000
    repeated = values.repeat(trials)
    kept = decode(encoded(format, repeated, thresholds(repeated.numel(), seed=5))).double()
    error = (kept - repeated).view(trials, SCALE_GROUP)
    deviation = error.mean(dim=0).abs() / (error.square().mean(dim=0) / trials + 1e-30).sqrt()
    assert (deviation > 0.1).sum() > SCALE_GROUP / 2  # there is something to round
    assert deviation.max() < 5


def test_nan_stays_nan_whatever_the_threshold() -> None:
    # Taken for numbers, the last of these would be rounded up to -0.0.
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)
    for format in (BF16_STOCHASTIC, ROOT8, LOG8):
        for threshold in (0, 1 << 16, 2**31, 2**32 - 1):
            kept = encoded(format, patterns.view(torch.float32), torch.full((5,), threshold))
            assert decode(kept).isnan().all(), (format, threshold)


@STOCHASTIC
@pytest.mark.parametrize("kind", ["narrow", "wide", "bit patterns"])
def test_what_is_on_the_grid_stays_whatever_the_threshold(format: Format, kind: str) -> None:
    numel = 300 * SCALE_GROUP + 17
    values = {"narrow": narrow_values(format, numel), "wide": wide_values(numel), "bit patterns": random_fp32(numel)}[
        kind
    ]
    values = torch.where(values.isnan(), 1.0, values.abs() if format is LOG8 else values)
    extremes = [torch.zeros(numel, dtype=torch.int64), torch.full((numel,), 2**32 - 1)]
    for first in (None, thresholds(numel), *extremes):
        stored = encoded(format, values, first)
        for second in (None, thresholds(numel, step=2), *extremes):
            assert_same_bits(encoded(format, decode(stored), second), stored)


def test_root8_keeps_the_largest_magnitude_and_rounds_the_others_to_the_nearest() -> None:
    values = narrow_values(ROOT8, 300 * SCALE_GROUP)
    stored = encoded(ROOT8, values)
    assert stored.scale is not None
    largest = values.view(-1, SCALE_GROUP).abs().amax(dim=1)
    assert torch.equal(stored.scale, largest)
    grid = torch.arange(128, dtype=torch.float64).div(127) ** 4
    quotient = values.double().abs().view(-1, SCALE_GROUP) / largest.double()[:, None]
    best = (quotient[..., None] - grid).abs().amin(dim=-1)
    kept = decode(stored).double().view(-1, SCALE_GROUP)
    error = (kept - values.double().view(-1, SCALE_GROUP)).abs() / largest.double()[:, None]
    assert ((error - best).abs() <= 2.0**-16 * (4 / 127) + 1e-7).all()
    assert (kept * values.view(-1, SCALE_GROUP) >= 0).all()


def test_log8_steps_are_an_eighth_over_32_binary_orders() -> None:
    values = torch.exp2(torch.linspace(-31.4, 0, 100 * SCALE_GROUP)).view(SCALE_GROUP, 100).t().flatten()
    stored = encoded(LOG8, values)
    assert stored.scale is not None
    assert set((bits(stored.scale) & 31).tolist()) == {20}
    error = (decode(stored) / values - 1).abs()
    assert error.max() <= 1 / 16 + 1e-6


@pytest.mark.parametrize(("shift", "orders"), [(20, 30.0), (19, 15.0), (18, 7.5), (17, 3.7), (16, 1.9)])
def test_log8_takes_the_finest_grid_that_reaches_the_smallest_value(shift: int, orders: float) -> None:
    values = torch.exp2(torch.linspace(-orders, 0, SCALE_GROUP)) * 3e-7
    stored = encoded(LOG8, values)
    assert stored.scale is not None
    assert int(bits(stored.scale) & 31) == shift
    assert ((decode(stored) / values - 1).abs() <= 2.0 ** (shift - 24) + 1e-6).all()


@pytest.mark.parametrize("shift", [16, 17, 18, 19])
def test_log8_grids_hold_253_numbers(shift: int) -> None:
    for numbers, expected in ((253, shift), (254, shift + 1)):
        lowest = (0x3F800000 >> shift) + 2  # even, so that the next coarser grid has it, too
        values = (torch.tensor([lowest, lowest + numbers - 1], dtype=torch.int32) << shift).view(torch.float32)
        stored = encoded(LOG8, values)
        assert stored.scale is not None
        assert int(bits(stored.scale) & 31) == expected
        assert torch.equal(decode(stored), values) == (numbers == 253)


@pytest.mark.parametrize("largest", [2.0**-126, 1e-30, 1.0, 3.4e38])
def test_positive_values_never_become_zero_in_log8(largest: float) -> None:
    values = torch.logspace(-44, 0, SCALE_GROUP, dtype=torch.float64).mul(largest).float()
    values[-1] = largest
    for taken in (None, torch.zeros(SCALE_GROUP, dtype=torch.int64), torch.full((SCALE_GROUP,), 2**32 - 1)):
        kept = decode(encoded(LOG8, values, taken))
        assert torch.equal(kept > 0, values > 0)
        assert kept.isfinite().all()


def test_log8_says_what_no_second_moment_can_be() -> None:
    values = torch.tensor([0.0, -0.0, float("inf"), -1.0, float("-inf"), float("nan"), 1.0])
    kept = decode(encoded(LOG8, values))
    assert kept[:3].tolist() == [0.0, 0.0, float("inf")]
    assert kept[3:6].isnan().all()
    assert kept[6] == 1.0


@pytest.mark.parametrize("format", [ROOT8, LOG8], ids=lambda format: format.name)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_costs_8_bit_neighbours_nothing(format: Format, value: float) -> None:
    values = narrow_values(format, SCALE_GROUP)
    values[7] = 0.0
    clean = decode(encoded(format, values))
    values[7] = value
    spoilt = decode(encoded(format, values))
    assert not spoilt[7].isfinite()
    assert torch.equal(spoilt[:7], clean[:7])
    assert torch.equal(spoilt[8:], clean[8:])


def test_thresholds_are_those_of_the_element() -> None:
    start = rounding_counter(3, 2**32 - 500)
    whole = thresholds(1000, counter=start)
    assert torch.equal(thresholds(600, counter=start + 400), whole[400:])
    assert len(set(whole.tolist())) == 1000
    for other in (
        thresholds(1000, counter=rounding_counter(4, 2**32 - 500)),
        thresholds(1000, counter=rounding_counter(3, 2**33 - 500)),
        thresholds(1000, counter=start, seed=1),
        thresholds(1000, counter=start, step=2),
        thresholds(1000, counter=start, moment=1),
    ):
        assert (other == whole).sum() <= 1


# -- remainders ------------------------------------------------------------------------------------


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    param = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(master.numel(), dtype=torch.int16)
    split_remainder_(param, remainder, master)
    return param, remainder


def masters_with_ties() -> torch.Tensor:
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    edges = [high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    masters = torch.cat([*edges, bits(random_fp32(1_000_000))]).view(torch.float32)
    return masters[~masters.isnan()]


def test_remainders_keep_every_bit() -> None:
    master = masters_with_ties()
    assert master.numel() > 1_300_000
    assert torch.equal(bits(join_remainder(*split(master))), bits(master))


def test_every_pair_of_parameter_and_remainder_is_reached() -> None:
    # With the test above this makes the split a bijection: no two masters share a pair, and no pair
    # is wasted.
    random = np.random.default_rng(1)
    param = torch.from_numpy(random.integers(-(2**15), 2**15, 1_000_000).astype(np.int16))
    remainder = torch.from_numpy(random.integers(-(2**15), 2**15, 1_000_000).astype(np.int16))
    master = join_remainder(param.view(torch.bfloat16), remainder)
    numbers = ~master.isnan()
    again, rest = split(master[numbers])
    assert numbers.sum() > 900_000
    assert torch.equal(bits(again), param[numbers])
    assert torch.equal(rest, remainder[numbers])


def test_remainder_parameters_are_the_master_rounded_half_away_from_zero() -> None:
    master = masters_with_ties()
    master = master[master.abs() < 3e38]
    param, _ = split(master)
    magnitude = bits(master.abs()).to(torch.int64)
    expected = ((magnitude + 0x8000) >> 16).to(torch.int16) | (bits(master) >> 16 & -0x8000).to(torch.int16)
    assert torch.equal(bits(param), expected)
    rounded_to_even = master.to(torch.bfloat16)
    assert (param != rounded_to_even).any()  # ties are among them


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000])
def test_nan_masters_stay_visible_in_the_parameter(pattern: int) -> None:
    # 0x7FFFFFFF is what a GPU computes; rounded like a number, its parameter would be -0.0.
    master = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    param, remainder = split(master)
    assert param.isnan().all()
    assert join_remainder(param, remainder).isnan().all()


def test_remainders_need_their_parameter() -> None:
    stored = empty(REMAINDER, 8)
    with pytest.raises(TypeError, match="split_remainder_"):
        encode_(stored, torch.zeros(8))
    with pytest.raises(TypeError, match="join_remainder"):
        decode(stored)
