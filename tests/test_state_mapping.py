"""``optimizer.state`` looks like torch's to whoever reads, writes or moves it; the values stay in
their storage.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from helpers import unchanged
from torch.multiprocessing.reductions import StorageWeakRef

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.kernels.formats import FP32, join_remainder
from fused_offload.memory import cuda_ipc
from fused_offload.state.entry import StateEntry
from fused_offload.state.mapping import StateMapping
from fused_offload.state.param_state import StateHooks

HYPERPARAMETERS = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.03}
SHAPES = [(5,), (3, 43), (300,)]
MOMENTS = ("exp_avg", "exp_avg_sq")

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"master_weights": True},
    "remainder": {"master_weights": True, "store_param_remainders": True, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16": {
        "master_weights": True,
        "master_weight_dtype": torch.float16,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
    },
    "uint8": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.uint8,
    },
}
SCALED = ("fp16", "uint8")
each_format = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Waits(NamedTuple):
    counted: list[int]

    def since(self, start: int) -> int:
        return len(self.counted) - start


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Counts how often a reader of the state waits for the last step."""
    counted: list[int] = []
    wait = FusedOffloadAdam._wait_for_state

    def counting(optimizer: FusedOffloadAdam) -> None:
        counted.append(1)
        wait(optimizer)

    monkeypatch.setattr(FusedOffloadAdam, "_wait_for_state", counting)
    return Waits(counted)


def make_params(device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def make(device: torch.device, format: str, steps: int = 2, **kwargs: Any) -> tuple[list[Any], FusedOffloadAdam]:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, **{**HYPERPARAMETERS, **FORMATS[format], **kwargs})
    train(optimizer, params, range(steps))
    return params, optimizer


def train(optimizer: torch.optim.Optimizer, params: list[Any], steps: range) -> None:
    """Steps with gradients that depend on the number of the step only."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        optimizer.step()


def step_without_lr(optimizer: FusedOffloadAdam, params: list[Any]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(optimizer, params, range(50, 51))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.shape == right.shape
    assert torch.equal(bits(left), bits(right))


def assert_same_training(
    left: FusedOffloadAdam, left_params: list[Any], right: FusedOffloadAdam, right_params: list[Any]
) -> None:
    """Both are the same, now and after two more steps."""
    for steps in (range(0), range(70, 72)):
        train(left, left_params, steps)
        train(right, right_params, steps)
        for one, other in zip(left_params, right_params, strict=True):
            assert_same_bits(one, other)
            assert set(left.state[one]) == set(right.state[other])
            for key in left.state[one]:
                assert_same_bits(left.get_unscaled_state(one, key), right.get_unscaled_state(other, key))


# -- a mapping like torch's ------------------------------------------------------------------------


def test_the_mapping_is_a_defaultdict(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    assert isinstance(optimizer.state, defaultdict)
    assert len(optimizer.state) == 0
    assert params[0] not in optimizer.state
    assert optimizer.state.get(params[0]) is None
    assert len(optimizer.state) == 0
    assert optimizer.state[params[0]] == {}  # reading makes an empty entry, as in torch
    assert isinstance(optimizer.state[params[0]], dict)
    assert list(optimizer.state) == [params[0]]
    assert optimizer.state_dict()["state"] == {}


def test_looking_around_neither_waits_nor_creates(device: torch.device, waits: Waits) -> None:
    params, optimizer = make(device, "fp32")
    start = len(waits.counted)
    assert len(optimizer.state) == 3
    assert params[0] in optimizer.state
    assert list(optimizer.state.keys()) == params
    for _, entry in optimizer.state.items():
        assert len(entry) == 3
        assert "exp_avg" in entry
        assert "step" not in entry
        assert list(entry) == list(entry.keys()) == ["exp_avg", "exp_avg_sq", "master_param"]
        assert entry.get("step") is None
        assert bool(entry)
    assert waits.since(start) == 0
    assert optimizer.memory_report().param_numel == 5 + 129 + 300


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda entry: entry["exp_avg"],
    "get": lambda entry: entry.get("exp_avg"),
    "items": lambda entry: dict(entry.items())["exp_avg"],
    "values": lambda entry: next(iter(entry.values())),
    "dict": lambda entry: dict(entry)["exp_avg"],
    "unpacking": lambda entry: {**entry}["exp_avg"],
    "copy method": lambda entry: entry.copy()["exp_avg"],
    "copy": lambda entry: copy.copy(entry)["exp_avg"],
    "union": lambda entry: (entry | {})["exp_avg"],
    "union from the right": lambda entry: ({} | entry)["exp_avg"],
    "update of another dict": lambda entry: (found := {}, found.update(entry), found["exp_avg"])[-1],
    "setdefault": lambda entry: entry.setdefault("exp_avg"),
}


@pytest.mark.parametrize("way", READS)
def test_every_way_to_a_tensor_waits(device: torch.device, waits: Waits, way: str) -> None:
    params, optimizer = make(device, "fp32")
    entry = optimizer.state[params[1]]
    start = len(waits.counted)
    value = READS[way](entry)
    assert waits.since(start) >= 1
    assert value is entry["exp_avg"]


def test_copies_of_an_entry_are_plain_dicts(device: torch.device) -> None:
    params, optimizer = make(device, "remainder")
    entry = optimizer.state[params[1]]
    for copied in (dict(entry), {**entry}, entry.copy(), copy.copy(entry), entry | {}):
        assert type(copied) is dict
        assert list(copied) == list(entry)
        assert all(copied[key] is entry[key] for key in entry)


def test_copies_of_the_mapping_are_plain_dicts(device: torch.device) -> None:
    params, optimizer = make(device, "remainder")
    for copied in (dict(optimizer.state), optimizer.state.copy(), copy.copy(optimizer.state), optimizer.state | {}):
        assert type(copied) is dict
        assert list(copied) == params
        assert all(copied[param] is optimizer.state[param] for param in params)


@each_format
def test_deep_copies_and_pickles(device: torch.device, format: str) -> None:
    params, optimizer = make(device, format)
    copies = [copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))]
    for copied in copies:
        assert type(copied) is dict
        assert [type(entry) for entry in copied.values()] == [dict] * 3
        for (param, entry), original in zip(copied.items(), params, strict=True):
            assert_same_bits(param, original)
            for key, value in optimizer.state[original].items():
                assert_same_bits(entry[key], value)
                assert entry[key].dtype == value.dtype
                assert entry[key].data_ptr() != value.data_ptr()


def test_deep_copies_and_pickles_take_what_they_hold(device: torch.device) -> None:
    """The tensors are views of storage that holds the state of many parameters."""
    params = [torch.nn.Parameter(torch.randn(1000, device=device)) for _ in range(50)]
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(1))
    entry = optimizer.state[params[0]]
    assert copy.deepcopy(entry)["exp_avg"].untyped_storage().nbytes() == 4000
    assert len(pickle.dumps(entry)) < 10_000


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@each_format
def test_a_value_by_itself_takes_its_own_bytes(device: torch.device, format: str, fraction: float) -> None:
    """In files, pickles and copies, also where it is one of many that lie together."""
    params = [torch.nn.Parameter(torch.randn(1024, device=device).bfloat16()) for _ in range(20)]
    optimizer = FusedOffloadAdam(params, **FORMATS[format], offload=OffloadConfig(fraction=fraction))
    train(optimizer, params, range(1))
    for state in (optimizer.state_dict()["state"], dict(enumerate(optimizer.state.values()))):
        for value in state[3].values():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            assert buffer.tell() < value.nbytes + 2000
            assert len(pickle.dumps(value)) < value.nbytes + 2000
            copied = copy.deepcopy(value)
            assert copied.untyped_storage().nbytes() <= value.nbytes + value.itemsize
            assert_same_bits(copied, value)
    for entry in optimizer.state.values():  # writers that keep what fills its storage copy these
        for view in entry.storage.views.values():
            assert view.untyped_storage().nbytes() == view.nbytes + view.itemsize


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@each_format
def test_resident_values_go_to_another_process_as_views_of_all_memory(
    device: torch.device, format: str, fraction: float
) -> None:
    """CUDA shares allocations only, and a value's storage is a part of one."""
    _, optimizer = make(device, format, offload=OffloadConfig(fraction=fraction))
    seen = 0
    for entry in optimizer.state.values():
        memory = entry.storage.extent._memory
        if device.type == "cpu":  # an extent does this itself on a GPU
            cuda_ipc.make_parts_shareable(memory)
        for key, value in entry.storage.views.items():
            sent = cuda_ipc.over_allocation(value)
            if memory.device.type == device.type:
                seen += 1
                assert sent.untyped_storage().data_ptr() == memory.data_ptr(), key
                assert sent.untyped_storage().nbytes() == memory.nbytes, key
            assert (sent.dtype, sent.shape, sent.stride()) == (value.dtype, value.shape, value.stride())
            assert sent.data_ptr() == value.data_ptr()
    assert seen
    elsewhere = torch.zeros(3, device=device)
    assert cuda_ipc.over_allocation(elsewhere) is elsewhere


@pytest.mark.gpu
@each_format
def test_resident_values_arrive_in_another_process(format: str) -> None:
    _, optimizer = make(torch.device("cuda"), format, offload=OffloadConfig(fraction=0.0))
    values = [value.detach() for entry in optimizer.state.values() for value in entry.storage.views.values()]
    context = torch.multiprocessing.get_context("spawn")
    sent, returned = context.SimpleQueue(), context.Queue()
    child = context.Process(target=_return_on_cpu, args=(sent, returned))
    child.start()
    sent.put(values)  # in this thread, where it fails for all to see
    arrived = returned.get(timeout=120)
    child.join()
    for value, copied in zip(values, arrived, strict=True):
        assert torch.equal(value.cpu().view(torch.uint8), torch.from_numpy(copied))


@pytest.mark.gpu
def test_memory_that_was_sent_is_free_without_the_optimizer() -> None:
    _, optimizer = make(torch.device("cuda"), "fp32", offload=OffloadConfig(fraction=0.0))
    storages = [entry.storage for entry in optimizer.state.values()]
    memory = [StorageWeakRef(storage.extent._memory.untyped_storage()) for storage in storages]
    context = torch.multiprocessing.get_context("spawn")
    sent, returned = context.SimpleQueue(), context.Queue()
    child = context.Process(target=_return_on_cpu, args=(sent, returned))
    child.start()
    sent.put([storage.views["exp_avg"].detach() for storage in storages])
    returned.get(timeout=120)
    child.join()
    del optimizer, storages
    gc.collect()
    assert all(reference.expired() for reference in memory)


def _return_on_cpu(sent: Any, returned: Any) -> None:
    returned.put([value.cpu().view(torch.uint8).numpy() for value in sent.get()])


def test_a_deep_copy_keeps_what_is_shared_shared(device: torch.device) -> None:
    params, optimizer = make(device, "fp32")
    entry = optimizer.state[params[0]]
    first, second = copy.deepcopy([entry, entry])
    assert first["exp_avg"] is second["exp_avg"]
    copied, weights = copy.deepcopy((optimizer.state, params))
    assert all(key is weight for key, weight in zip(copied, weights, strict=True))


def test_values_are_shaped_like_their_parameter(device: torch.device) -> None:
    param = torch.nn.Parameter(torch.randn(20, 30, device=device).t())
    image = torch.nn.Parameter(torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last))
    optimizer = FusedOffloadAdam([param, image])
    train(optimizer, [param, image], range(1))
    for key in MOMENTS:
        assert optimizer.state[param][key].stride() == param.stride()
        assert optimizer.state[image][key].stride() == image.stride()
    assert param.grad is not None
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], 0.1 * param.grad.cpu())


# -- writing ---------------------------------------------------------------------------------------


@each_format
def test_its_own_view_may_be_written_back(device: torch.device, format: str) -> None:
    params, optimizer = make(device, format)
    twins, undisturbed = make(device, format)
    for param in params:
        for key in list(optimizer.state[param]):
            view = optimizer.state[param][key]
            optimizer.state[param][key] = view
            assert optimizer.state[param][key] is view
        optimizer.state[param] = optimizer.state[param]
        optimizer.state[param].update(dict(optimizer.state[param]))
    assert_same_training(optimizer, params, undisturbed, twins)


WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda values: values,
    "another dtype": lambda values: values.double(),
    "narrower": lambda values: values.bfloat16(),
    "transposed": lambda values: values.t().contiguous().t(),
    "every other element": lambda values: torch.stack([values, values], -1)[..., 0],
    "needs a gradient": lambda values: values.clone().requires_grad_(),
    "expanded": lambda values: values[:1, :1].expand(values.shape),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_values_are_copied_in(device: torch.device, kind: str) -> None:
    params, optimizer = make(device, "fp32")
    entry = optimizer.state[params[1]]
    view = entry["exp_avg"]
    address = view.data_ptr()
    written = WRITTEN[kind](torch.randn(3, 43)).to(device)
    entry["exp_avg"] = written
    assert entry["exp_avg"] is view
    assert view.data_ptr() == address
    assert not view.requires_grad
    assert_same_bits(view, written.float())
    with torch.no_grad():
        written.zero_()
    assert view.any()  # nothing that a caller keeps is adopted


@pytest.mark.parametrize("key", [*MOMENTS, "master_param"])
def test_an_entry_is_written_by_a_union_in_place(device: torch.device, key: str) -> None:
    params, optimizer = make(device, "fp32")
    entry = kept = optimizer.state[params[1]]
    view, values = entry[key], torch.rand(3, 43, device=device)
    entry |= {key: values}
    assert entry is kept
    assert entry[key] is view
    assert_same_bits(view, values)


def test_a_square_view_may_be_written_back_transposed(device: torch.device) -> None:
    param = torch.nn.Parameter(torch.randn(6, 6, device=device))
    optimizer = FusedOffloadAdam([param])
    train(optimizer, [param], range(1))
    entry = optimizer.state[param]
    expected = entry["exp_avg"].t().clone()
    entry["exp_avg"] = entry["exp_avg"].t()
    assert_same_bits(entry["exp_avg"], expected)
    optimizer.set_scaled_state(param, "exp_avg", entry["exp_avg"].t())
    assert_same_bits(entry["exp_avg"], expected.t())
    entry["exp_avg"] = entry["exp_avg"][:1].expand(6, 6)
    assert_same_bits(entry["exp_avg"], expected.t()[:1].expand(6, 6))


@each_format
def test_written_values_are_used(device: torch.device, format: str) -> None:
    """State written by hand is as good as state that was trained."""
    params, optimizer = make(device, format)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    written = FusedOffloadAdam(twins, **HYPERPARAMETERS, **FORMATS[format])
    for param, twin in zip(params, twins, strict=True):
        for key in optimizer.state[param]:
            written.state[twin][key] = optimizer.get_unscaled_state(param, key).clone()
        written.state[twin]["step"] = torch.tensor(2.0)
    assert_same_training(optimizer, params, written, twins)


def test_step_goes_to_the_group(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.state[params[2]]["step"] = torch.tensor([41.0])
    assert "step" not in optimizer.param_groups[0]
    assert optimizer.param_groups[1]["step"] == 41
    assert type(optimizer.param_groups[1]["step"]) is int
    assert "step" not in optimizer.state[params[2]]
    with pytest.raises(KeyError, match="in no group"):
        optimizer.state[torch.nn.Parameter(torch.zeros(3, device=device))]["step"] = 5


REFUSED: dict[str, tuple[str, Any, type[Exception], str]] = {
    "unknown key": ("max_exp_avg_sq", torch.zeros(3, 43), KeyError, "exp_avg, exp_avg_sq, master_param"),
    "number": ("exp_avg", 0.0, TypeError, "should be a tensor, but got float"),
    "none": ("exp_avg", None, TypeError, "should be a tensor, but got NoneType"),
    "integers": ("exp_avg", torch.zeros(3, 43, dtype=torch.int64), TypeError, "should be a floating point tensor"),
    "remainder": ("master_param", torch.zeros(3, 43, dtype=torch.int16), TypeError, "16-bit remainder"),
    "meta": ("exp_avg", torch.zeros(3, 43, device="meta"), TypeError, "should be a dense tensor with data"),
    "sparse": ("exp_avg", torch.zeros(3, 43).to_sparse(), TypeError, "should be a dense tensor with data"),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stored_is_refused(device: torch.device, kind: str, trained: bool) -> None:
    key, value, error, message = REFUSED[kind]
    params, optimizer = make(device, "fp32", steps=2 if trained else 0)
    twins, undisturbed = make(device, "fp32", steps=2 if trained else 0)
    with pytest.raises(error, match=message):
        optimizer.state[params[1]][key] = value
    train(optimizer, params, range(2, 4))
    train(undisturbed, twins, range(2, 4))
    assert_same_training(optimizer, params, undisturbed, twins)


def test_a_master_is_not_taken_for_a_remainder(device: torch.device) -> None:
    params, optimizer = make(device, "remainder")
    with pytest.raises(TypeError, match=r"kept as torch\.int16, but got torch\.float32.*store_param_remainders"):
        optimizer.state[params[0]]["master_param"] = torch.zeros(5)


def test_raw_elements_need_scales(device: torch.device) -> None:
    """Elements of a block-scaled format mean nothing without the scales that they were written
    with.
    """
    params, optimizer = make(device, "fp16", steps=0)
    entry = optimizer.state[params[0]]
    entry["exp_avg"] = torch.zeros(5, dtype=torch.float16)
    with pytest.raises(ValueError, match="exp_avg_sq has no scales yet"):
        entry["exp_avg_sq"] = torch.ones(5, dtype=torch.float16)
    entry["exp_avg_sq"] = torch.full((5,), 0.375)
    assert_same_bits(optimizer.get_unscaled_state(params[0], "exp_avg_sq"), torch.full((5,), 0.375))
    entry["exp_avg_sq"] = entry["exp_avg_sq"] * 2  # raw, with the scales it has
    assert_same_bits(optimizer.get_unscaled_state(params[0], "exp_avg_sq"), torch.full((5,), 0.75))


def test_8_bit_elements_are_no_values(device: torch.device) -> None:
    """Not taken for the numbers 0 to 255 where values are expected, nor where nobody can know their
    scales.
    """
    params, optimizer = make(device, "uint8")
    raw = optimizer.state[params[0]]["exp_avg"].clone()
    assert raw.dtype == torch.uint8
    with pytest.raises(TypeError, match=r"floating point tensor, but got torch\.uint8"):
        optimizer.set_scaled_state(params[0], "exp_avg", raw)
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["exp_avg"] = raw
    with pytest.raises(TypeError, match=r"floating point tensor, but got torch\.uint8"):
        optimizer.load_state_dict(state_dict)
    params, optimizer = make(device, "fp32")
    with pytest.raises(TypeError, match=r"floating point tensor, but got torch\.uint8"):
        optimizer.state[params[0]]["exp_avg"] = raw


def test_8_bit_elements_of_another_time_are_refused(device: torch.device) -> None:
    """Their scales are not those of now, so that they would be other values."""
    params, optimizer = make(device, "uint8")
    entry = optimizer.state[params[1]]
    kept = copy.deepcopy(entry)
    entry.update(kept)  # nothing has changed since
    train(optimizer, params, range(2, 3))
    with unchanged(optimizer):
        for key in ("exp_avg", "exp_avg_sq"):
            with pytest.raises(ValueError, match=f"{key} is kept as bytes"):
                entry[key] = kept[key]
    entry["exp_avg"] = torch.zeros_like(kept["exp_avg"])  # the same whatever the scales
    assert not optimizer.get_unscaled_state(params[1], "exp_avg").any()


def test_keys_stay_together(device: torch.device) -> None:
    params, optimizer = make(device, "fp32")
    entry = optimizer.state[params[0]]
    removals: list[Callable[[], Any]] = [
        lambda: entry.pop("exp_avg"),
        lambda: entry.__delitem__("exp_avg"),
        entry.popitem,
        entry.clear,
    ]
    for remove in removals:
        with pytest.raises(TypeError, match="cannot be removed one by one"):
            remove()
    assert set(entry) == {"exp_avg", "exp_avg_sq", "master_param"}


# Elements of uint8 are no numbers.
@pytest.mark.parametrize("format", [format for format in FORMATS if format != "uint8"])
def test_writes_into_views_are_honoured(device: torch.device, format: str) -> None:
    params, optimizer = make(device, format)
    twins, other = make(device, format)
    for param, twin in zip(params, twins, strict=True):
        optimizer.state[param]["exp_avg"].mul_(0.5)  # a power of two: exact in every format
        other.set_scaled_state(twin, "exp_avg", other.get_unscaled_state(twin, "exp_avg") * 0.5)
    assert_same_training(optimizer, params, other, twins)


def fill(value: torch.Tensor, seed: int) -> None:
    value.copy_(torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)))


HANDED_OUT: dict[str, Callable[[FusedOffloadAdam, Any, str], torch.Tensor]] = {
    "entry": lambda optimizer, param, key: optimizer.state[param][key],
    "items": lambda optimizer, param, key: dict(optimizer.state[param].items())[key],
    "unscaled": lambda optimizer, param, key: optimizer.get_unscaled_state(param, key),
    "state dict": lambda optimizer, param, key: optimizer.state_dict()["state"][0][key],
}


@pytest.mark.parametrize("way", HANDED_OUT)
@pytest.mark.parametrize("when", ["before the first step", "after a step"])
def test_moments_written_into_views_are_used(device: torch.device, way: str, when: str) -> None:
    steps = 0 if when == "before the first step" else 1
    param = make_params(device, torch.float32)[2]
    optimizer = FusedOffloadAdam([param], **HYPERPARAMETERS)
    optimizer.initialize_state(param)
    train(optimizer, [param], range(steps))
    twin = torch.nn.Parameter(param.detach().clone())
    expected = FusedOffloadAdam([twin], **HYPERPARAMETERS)
    if steps:
        expected.state[twin]["step"] = steps
    for seed, key in enumerate(MOMENTS):
        fill(HANDED_OUT[way](optimizer, param, key), seed)
        value = torch.empty(300)
        fill(value, seed)
        expected.set_scaled_state(twin, key, value)
    assert_same_training(optimizer, [param], expected, [twin])


def test_masters_written_into_views_are_used(device: torch.device) -> None:
    param = make_params(device)[2]
    optimizer = FusedOffloadAdam([param], master_weights=True)
    optimizer.initialize_state(param)
    optimizer.state[param]["master_param"].fill_(1 + 2.0**-12)
    step_without_lr(optimizer, [param])
    assert (optimizer.state[param]["master_param"] == 1 + 2.0**-12).all()
    assert (param == 1).all()


@each_format
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_views_that_were_moved_come_home(device: torch.device, format: str, where: str) -> None:
    """Code that frees GPU memory between phases moves state with ``tensor.data = ...``, or writes
    copies back.
    """
    params, optimizer = make(device, format)
    twins, undisturbed = make(device, format)
    target = device if where == "device" else torch.device("cpu")
    homes = [[view.data_ptr() for view in optimizer.state[param].values()] for param in params]
    for param in params[:2]:
        for view in optimizer.state[param].values():
            view.data = view.to(target, copy=True)
    for key, view in list(optimizer.state[params[2]].items()):
        optimizer.state[params[2]][key] = view.to(target, copy=True)
    train(optimizer, params, range(2, 3))
    train(undisturbed, twins, range(2, 3))
    assert [[view.data_ptr() for view in optimizer.state[param].values()] for param in params] == homes
    assert_same_training(optimizer, params, undisturbed, twins)


LENDERS: dict[str, Callable[[FusedOffloadAdam, Any], torch.Tensor]] = {
    "getitem": lambda optimizer, param: optimizer.state[param]["exp_avg"],
    "get": lambda optimizer, param: optimizer.state[param].get("exp_avg"),
    "items": lambda optimizer, param: dict(optimizer.state[param].items())["exp_avg"],
    "values": lambda optimizer, param: next(iter(optimizer.state[param].values())),
    "dict": lambda optimizer, param: dict(optimizer.state[param])["exp_avg"],
    "setdefault": lambda optimizer, param: optimizer.state[param].setdefault("exp_avg"),
    "peek": lambda optimizer, param: optimizer.state[param].peek("exp_avg"),
    "state_dict": lambda optimizer, param: optimizer.state_dict()["state"][1]["exp_avg"],
    "torch_state_dict": lambda optimizer, param: optimizer.torch_state_dict()["state"][1]["exp_avg"],
    "get_unscaled_state": lambda optimizer, param: optimizer.get_unscaled_state(param, "exp_avg"),
    "skip_unscale": lambda optimizer, param: optimizer.get_unscaled_state(param, "exp_avg", skip_unscale=True),
}


@pytest.mark.parametrize("lender", LENDERS)
def test_views_come_home_whoever_gave_them_out(device: torch.device, lender: str) -> None:
    """Steps look at views only once one was given out, by whatever way."""
    params, optimizer = make(device, "fp32")
    assert not optimizer._hooks.lent
    view = LENDERS[lender](optimizer, params[1])
    home = view.data_ptr()
    train(optimizer, params, range(2, 3))  # it may be moved long after
    view.data = torch.full_like(view, 7.0)
    train(optimizer, params, range(3, 4))
    assert view.data_ptr() != home
    assert params[1].grad is not None
    expected = 7.0 * 0.8 + params[1].grad.float() * (1 - 0.8)
    found = optimizer.state[params[1]]["exp_avg"]
    assert found.data_ptr() == home
    torch.testing.assert_close(found, expected.to(found.device), rtol=1e-5, atol=0)


def test_state_of_an_empty_param_takes_no_device() -> None:
    """It has no bytes, but code that maps a checkpoint's tensors expects all of them on the CPU."""
    hooks = StateHooks(lambda: None, lambda param, step: None, lambda param: None, lambda: None)
    entry = StateEntry(hooks, torch.empty(0, 3, device="meta"))  # any device that is not the CPU
    entry.bind(None, 0, {"exp_avg": FP32})
    assert entry.peek("exp_avg").device.type == "cpu"
    assert entry.peek("exp_avg").shape == (0, 3)


READERS: dict[str, Callable[[FusedOffloadAdam, Any], torch.Tensor]] = {
    "state_dict": lambda optimizer, param: optimizer.state_dict()["state"][0]["exp_avg"],
    "torch_state_dict": lambda optimizer, param: optimizer.torch_state_dict()["state"][0]["exp_avg"],
    "get_unscaled_state": lambda optimizer, param: optimizer.get_unscaled_state(param, "exp_avg"),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_see_views_that_were_moved(device: torch.device, reader: str) -> None:
    params, optimizer = make(device, "fp32")
    home = optimizer.state[params[0]]["exp_avg"].data_ptr()
    optimizer.state[params[0]]["exp_avg"].data = torch.full((5,), 7.0, device=device)
    found = READERS[reader](optimizer, params[0])
    assert found.data_ptr() == home
    assert found.tolist() == [7.0] * 5


# -- moving ----------------------------------------------------------------------------------------


def replace(optimizer: FusedOffloadAdam, old: Any, new: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [new if param is old else param for param in params]


MOVES: dict[str, Callable[[StateMapping, Any, Any], None]] = {
    "pop": lambda state, old, new: state.__setitem__(new, state.pop(old)),
    "assign and delete": lambda state, old, new: (state.__setitem__(new, state[old]), state.__delitem__(old))[0],
    "plain dict": lambda state, old, new: (state.__setitem__(new, dict(state[old])), state.__delitem__(old))[0],
    "update": lambda state, old, new: state.update({new: state.pop(old)}),
    "union in place": lambda state, old, new: (state.__ior__({new: state.pop(old)}), None)[1],
    "setdefault": lambda state, old, new: (state.setdefault(new, state.pop(old)), None)[1],
}


@each_format
@pytest.mark.parametrize("move", MOVES)
def test_an_entry_moves_with_all_that_belongs_to_it(device: torch.device, format: str, move: str) -> None:
    params, optimizer = make(device, format)
    twins, undisturbed = make(device, format)
    old, new = params[1], torch.nn.Parameter(params[1].detach().clone())
    if move == "plain dict" and format in SCALED:
        # The scales are not in the dict: no value is better than a wrong one.
        with pytest.raises(ValueError, match="no scales yet"):
            MOVES[move](optimizer.state, old, new)
        return
    MOVES[move](optimizer.state, old, new)
    replace(optimizer, old, new)
    params[1] = new
    assert old not in optimizer.state
    assert isinstance(optimizer.state[new], StateEntry)
    assert_same_training(optimizer, params, undisturbed, twins)


def test_a_moved_entry_keeps_its_memory(device: torch.device) -> None:
    params, optimizer = make(device, "fp32")
    views = dict(optimizer.state[params[1]])
    report = optimizer.memory_report()
    new = torch.nn.Parameter(params[1].detach().clone())
    optimizer.state[new] = optimizer.state.pop(params[1])
    replace(optimizer, params[1], new)
    assert all(optimizer.state[new][key] is views[key] for key in views)
    assert optimizer.memory_report() == report


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("format", ["fp32", "fp16", "remainder"])
def test_an_entry_moves_to_a_parameter_of_other_strides(device: torch.device, format: str, steps: int) -> None:
    params, optimizer = make(device, format, steps=steps)
    twins, undisturbed = make(device, format, steps=steps)
    for param in params:
        optimizer.initialize_state(param)
    old = params[1]
    new = torch.nn.Parameter(old.detach().t().contiguous().t())
    assert new.stride() != old.stride()
    optimizer.state[new] = optimizer.state.pop(old)
    replace(optimizer, old, new)
    params[1] = new
    if format == "fp16" and steps:  # blocks of other elements share a scale now: near, not the same
        for key in MOMENTS:
            torch.testing.assert_close(
                optimizer.get_unscaled_state(new, key), undisturbed.get_unscaled_state(twins[1], key), rtol=1e-3, atol=0
            )
        step_without_lr(optimizer, params)
        torch.testing.assert_close(new, old, rtol=2.0**-7, atol=0)
    else:
        train(optimizer, params, range(steps, steps + 1))
        train(undisturbed, twins, range(steps, steps + 1))
        for one, other in zip(params, twins, strict=True):
            assert_same_bits(one, other)
        if format != "fp16":
            assert_same_training(optimizer, params, undisturbed, twins)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_an_entry_moves_to_a_parameter_of_another_dtype(device: torch.device, dtypes: Any) -> None:
    """Its moments do; a master weight is kept exactly where the new parameter needs one."""
    optimizers = []
    for dtype in (dtypes[0], dtypes[1]):
        params = make_params(device, dtype)
        optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS, master_weights=True)
        train(optimizer, params, range(2))
        optimizers.append((params, optimizer))
    (params, optimizer), (twins, undisturbed) = optimizers
    old, new = params[1], torch.nn.Parameter(twins[1].detach().clone())
    moments = {key: optimizer.state[old][key].clone() for key in MOMENTS}
    optimizer.state[new] = optimizer.state.pop(old)
    replace(optimizer, old, new)
    assert list(optimizer.state[new]) == list(undisturbed.state[twins[1]])
    for key in MOMENTS:
        assert_same_bits(optimizer.state[new][key], moments[key])
    params[1] = new
    train(optimizer, params, range(2, 3))
    assert optimizer.state_dict()["state"][1].keys() == undisturbed.state_dict()["state"][1].keys()


def test_a_moved_entry_without_masters_takes_the_new_parameter(device: torch.device) -> None:
    params, optimizer = make(device, "fp32", steps=0)
    for param in params:
        optimizer.initialize_state(param)
    new = torch.nn.Parameter(make_params(device, seed=9)[1].detach())
    weights = new.detach().clone()
    optimizer.state[new] = optimizer.state.pop(params[1])
    replace(optimizer, params[1], new)
    params[1] = new
    step_without_lr(optimizer, params)
    assert_same_bits(new, weights)


@each_format
def test_state_of_another_optimizer_is_copied(device: torch.device, format: str) -> None:
    params, optimizer = make(device, format)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = FusedOffloadAdam(twins, **HYPERPARAMETERS, **FORMATS[format])
    other.state = {twin: optimizer.state[param] for param, twin in zip(params, twins, strict=True)}
    other.param_groups[0]["step"] = 2
    for param, twin in zip(params, twins, strict=True):
        assert other.state[twin] is not optimizer.state[param]
        for key in other.state[twin]:
            assert other.state[twin][key].data_ptr() != optimizer.state[param][key].data_ptr()
    assert_same_training(optimizer, params, other, twins)
    assert optimizer.param_groups[0]["step"] == other.param_groups[0]["step"]


def test_state_of_another_optimizer_replaces_what_was_there(device: torch.device) -> None:
    params, optimizer = make(device, "fp32", steps=0)
    twins, other = make(device, "fp32")
    optimizer.initialize_state(params[0])
    weights = make_params(device, seed=9)[0].detach()
    with torch.no_grad():
        twins[0].copy_(weights)
    other.state[twins[0]] = optimizer.state[params[0]]  # nothing is set there
    step_without_lr(other, twins)
    assert_same_bits(twins[0], weights)


def test_the_mapping_can_be_assigned(device: torch.device) -> None:
    params, optimizer = make(device, "fp32")
    twins, undisturbed = make(device, "fp32")
    mapping = optimizer.state
    optimizer.state = dict(optimizer.state)
    assert optimizer.state is mapping
    assert list(optimizer.state) == params
    assert_same_training(optimizer, params, undisturbed, twins)


# -- distributed parameters ------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks, of which this is the first; they cannot talk."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield torch.distributed.init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_state_of_another_global_shape_is_refused(mesh: Any) -> None:
    """Also where this rank has as many rows of either: other ranks have not."""
    from torch.distributed.tensor import DTensor, Shard

    def shard(rows: int, local: torch.Tensor) -> Any:
        shape = torch.Size((rows, 4))
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(4, 1))

    five, six = (torch.nn.Parameter(shard(rows, torch.ones(3, 4))) for rows in (5, 6))
    optimizer = FusedOffloadAdam([five, six], **HYPERPARAMETERS)
    for param in (five, six):
        optimizer.initialize_state(param)
        for key in MOMENTS:
            optimizer.set_scaled_state(param, key, torch.full((3, 4), 0.5))
    values = torch.full((3, 4), 0.25)
    writes: list[Callable[[], Any]] = [
        lambda: optimizer.state[five].update(exp_avg=shard(6, values)),
        lambda: optimizer.set_scaled_state(five, "exp_avg", shard(6, values)),
        lambda: optimizer.state.update({five: optimizer.state[six]}),
        lambda: optimizer.load_state_dict(swapped(optimizer.state_dict())),
    ]
    for write in writes:
        with unchanged_local(optimizer), pytest.raises(ValueError, match=r"shape \(6, 4\)"):
            write()
    optimizer.state[five]["exp_avg"] = shard(5, values)
    assert_same_bits(optimizer.state[five]["exp_avg"].to_local(), values)


def swapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["state"] = {0: state_dict["state"][1], 1: state_dict["state"][0]}
    return state_dict


@contextmanager
def unchanged_local(optimizer: FusedOffloadAdam) -> Iterator[None]:
    """Asserts that the block changes no bit of this rank's part of the state."""

    def local_bits() -> list[torch.Tensor]:
        return [bits(view) for entry in optimizer.state.values() for view in entry.storage.views.values()]

    before = local_bits()
    yield
    assert all(map(torch.equal, local_bits(), before))


# -- starting over ---------------------------------------------------------------------------------


RESETS: dict[str, Callable[[FusedOffloadAdam], Any]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "pop": lambda optimizer: [optimizer.state.pop(param) for param in list(optimizer.state)],
    "del": lambda optimizer: [optimizer.state.__delitem__(param) for param in list(optimizer.state)],
    "popitem": lambda optimizer: [optimizer.state.popitem() for _ in list(optimizer.state)],
    "assign": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "setstate": lambda optimizer: optimizer.__setstate__({"state": defaultdict(dict)}),
    "setstate with groups": lambda optimizer: optimizer.__setstate__(
        {"state": defaultdict(dict), "param_groups": optimizer.param_groups}
    ),
    "empty entries": lambda optimizer: [optimizer.state.__setitem__(param, {}) for param in list(optimizer.state)],
    "assigned empty entries": lambda optimizer: setattr(optimizer, "state", {p: {} for p in optimizer.state}),
}


@pytest.mark.parametrize("format", ["fp32", "uint8"])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("reset", RESETS)
def test_state_that_is_dropped_starts_over(device: torch.device, format: str, reset: str, saved: bool) -> None:
    """With the step count of its group: the first update has the size of the first."""
    params, optimizer = make(device, format, steps=5)
    RESETS[reset](optimizer)
    assert not any(entry for entry in optimizer.state.values())
    assert optimizer.state_dict()["state"] == {}
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    fresh = FusedOffloadAdam(twins, **HYPERPARAMETERS, **FORMATS[format])
    if saved:
        fresh.load_state_dict(optimizer.state_dict())
    train(optimizer, params, range(2))
    train(fresh, twins, range(2))
    assert optimizer.param_groups[0]["step"] == 2
    assert_same_training(optimizer, params, fresh, twins)


def test_only_groups_without_any_state_start_over(device: torch.device) -> None:
    params = make_params(device, torch.float32)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = FusedOffloadAdam(groups, **HYPERPARAMETERS)
    train(optimizer, params, range(3))
    optimizer.state.pop(params[0])
    optimizer.state.pop(params[2])
    train(optimizer, params, range(1))
    assert [group["step"] for group in optimizer.param_groups] == [4, 1]


@pytest.mark.parametrize("way", ["group", "entry"])
def test_a_step_that_is_set_after_state_was_dropped_is_kept(device: torch.device, way: str) -> None:
    params, optimizer = make(device, "fp32")
    optimizer.state.clear()
    if way == "group":
        optimizer.param_groups[0]["step"] = 7
    else:
        optimizer.state[params[0]]["step"] = 2  # what it was
    train(optimizer, params, range(1))
    assert optimizer.param_groups[0]["step"] == (8 if way == "group" else 3)


def test_a_group_whose_only_entry_moves_keeps_its_step(device: torch.device) -> None:
    param = make_params(device)[0]
    optimizer = FusedOffloadAdam([param], **HYPERPARAMETERS)
    train(optimizer, [param], range(2))
    new = torch.nn.Parameter(param.detach().clone())
    optimizer.state[new] = optimizer.state.pop(param)
    replace(optimizer, param, new)
    train(optimizer, [new], range(1))
    assert optimizer.param_groups[0]["step"] == 3


PRUNED = [1, 2, 4]
RESHAPES: dict[str, Callable[[Any, Any, Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "edited, then handed on": lambda state, old, change: [
        state[old].update({key: change(state[old][key]) for key in MOMENTS}),
        state.pop(old),
    ][1],
    "taken out, then edited": lambda state, old, change: [
        entry := state.pop(old),
        *[entry.__setitem__(key, change(entry[key])) for key in MOMENTS],
    ][0],
    "as a plain dict": lambda state, old, change: {key: change(value) for key, value in state.pop(old).items()},
}
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pruned": lambda values: values[PRUNED],
    "grown": lambda values: torch.cat([values, torch.zeros_like(values[:2])]),
}


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", RESHAPES)
def test_a_parameter_is_pruned_or_grown_with_its_state(
    device: torch.device, way: str, change: str, masters: bool
) -> None:
    """As Gaussian splatting does, and torch's AdamW beside it."""
    start = torch.randn(5, 7, generator=torch.Generator().manual_seed(3)).to(device)
    optimizers: list[Any] = [
        FusedOffloadAdam([torch.nn.Parameter(start.clone())], lr=0.01, weight_decay=0.0, master_weights=masters),
        torch.optim.AdamW([torch.nn.Parameter(start.clone())], lr=0.01, weight_decay=0.0),
    ]
    results = []
    for optimizer in optimizers:
        old = optimizer.param_groups[0]["params"][0]
        train(optimizer, [old], range(3))
        new = torch.nn.Parameter(CHANGES[change](old.detach()).clone())
        optimizer.state[new] = (
            RESHAPES[way](optimizer.state, old, CHANGES[change])
            if isinstance(optimizer, FusedOffloadAdam)
            else {k: CHANGES[change](v) if v.dim() else v for k, v in optimizer.state.pop(old).items()}
        )
        optimizer.param_groups[0]["params"] = [new]
        train(optimizer, [new], range(3, 6))
        results.append([new, *(optimizer.state[new][key] for key in MOMENTS)])
    assert optimizers[0].param_groups[0]["step"] == 6
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-6)


def test_a_parameter_that_changes_its_shape_with_its_state(device: torch.device) -> None:
    params, optimizer = make(device, "fp32")
    entry = optimizer.state[params[1]]
    expected = {key: entry[key][:2].clone() for key in MOMENTS}
    for key in MOMENTS:
        entry[key] = entry[key][:2]
        assert_same_bits(entry[key], expected[key])
        assert_same_bits(copy.deepcopy(entry)[key], expected[key])
    params[1].data = params[1].data[:2].clone()
    state_dict = optimizer.state_dict()
    for key in MOMENTS:
        assert_same_bits(state_dict["state"][1][key], expected[key])
        assert_same_bits(optimizer.get_unscaled_state(params[1], key), expected[key])
    train(optimizer, params, range(2, 4))
    assert optimizer.state[params[1]]["exp_avg"].shape == (2, 43)


@pytest.mark.parametrize("kind", ["transposed", "flat"])
def test_state_of_a_shape_that_its_parameter_has_not(device: torch.device, kind: str) -> None:
    """Noticed when it would be used; nothing has changed until then, and a value that fits takes
    its place.
    """
    params, optimizer = make(device, "fp32")
    twins, undisturbed = make(device, "fp32")
    entry = optimizer.state[params[1]]
    kept = entry["exp_avg"].clone()
    entry["exp_avg"] = kept.t() if kind == "transposed" else kept.flatten()
    for use in (optimizer.step, optimizer.state_dict, optimizer.torch_state_dict):
        with unchanged(optimizer), pytest.raises(RuntimeError, match=r"exp_avg of a parameter has shape .* \(3, 43\)"):
            use()
    with pytest.raises(ValueError, match=r"shape \(3, 43\)"):
        optimizer.state[twins[1].detach().clone()] = entry
    entry["exp_avg"] = kept
    assert_same_training(optimizer, params, undisturbed, twins)


@pytest.mark.parametrize("format", SCALED)
def test_elements_beside_scales_are_not_taken_for_values(device: torch.device, format: str) -> None:
    params, optimizer = make(device, format)
    entry = optimizer.state[params[1]]
    with unchanged(optimizer), pytest.raises((ValueError, TypeError), match=r"only with their scales"):
        entry["exp_avg"] = entry["exp_avg"][:2]


@each_format
def test_a_dict_takes_the_place_of_what_was_there(device: torch.device, format: str) -> None:
    params, optimizer = make(device, format)
    values = torch.full(params[1].shape, 0.5)
    optimizer.state[params[1]] = {"exp_avg": values}
    assert_same_bits(optimizer.get_unscaled_state(params[1], "exp_avg"), values)
    assert not optimizer.get_unscaled_state(params[1], "exp_avg_sq").any()
    with torch.no_grad():
        params[1].fill_(2.0)  # the master again
    step_without_lr(optimizer, params)
    assert params[1].eq(2.0).all()


def test_what_is_no_dict_is_no_state(device: torch.device) -> None:
    params, optimizer = make(device, "fp32")
    with unchanged(optimizer), pytest.raises(TypeError, match="should be a dict of tensors, but got int"):
        optimizer.state[params[0]] = 5


@each_format
def test_moments_that_a_load_resets_are_zero(device: torch.device, format: str) -> None:
    """Also for who reads them before a step writes them."""
    params, optimizer = make(device, format)
    fresh = FusedOffloadAdam(make_params(device), **FORMATS[format])
    optimizer.load_state_dict(fresh.state_dict())
    for key in MOMENTS:
        assert not optimizer.get_unscaled_state(params[1], key).any()
        assert not optimizer.state[params[2]][key].any()


def test_one_parameter_starts_over(device: torch.device) -> None:
    params, optimizer = make(device, "fp32")
    twins, undisturbed = make(device, "fp32")
    taken = optimizer.state.pop(params[0])
    assert set(taken) == {"exp_avg", "exp_avg_sq", "master_param"}
    train(optimizer, params, range(2, 3))
    train(undisturbed, twins, range(2, 3))
    assert params[0].grad is not None
    beta1 = torch.tensor(0.8)
    assert_same_bits(optimizer.state[params[0]]["exp_avg"], params[0].grad.cpu().float() * (1 - beta1))
    for param, twin in zip(params[1:], twins[1:], strict=True):
        assert_same_bits(param, twin)
        assert_same_bits(optimizer.state[param]["exp_avg"], undisturbed.state[twin]["exp_avg"])


# -- what Megatron does ----------------------------------------------------------------------------


def test_zeros_written_before_the_first_step(device: torch.device) -> None:
    """As Megatron's init_state_fn does, in the parameter's dtype and on its device."""
    params, optimizer = make(device, "fp32", steps=0)
    for param in params:
        if len(optimizer.state[param]) == 0:
            optimizer.state[param]["exp_avg"] = torch.zeros_like(param.data)
            optimizer.state[param]["exp_avg_sq"] = torch.zeros_like(param.data)
    for param in params:
        for key in MOMENTS:
            assert optimizer.state[param][key].dtype == torch.float32
            assert optimizer.state[param][key].device.type == "cpu"
    weights = make_params(device, seed=9)  # loaded after the optimizer was built
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    fresh = FusedOffloadAdam(weights, **HYPERPARAMETERS, **FORMATS["fp32"])
    train(optimizer, params, range(2))
    train(fresh, weights, range(2))
    assert_same_training(optimizer, params, fresh, weights)


@each_format
@pytest.mark.parametrize("arguments", [(), (None,), "kept"])
def test_initialize_state(device: torch.device, format: str, arguments: Any) -> None:
    params, optimizer = make(device, format, steps=0)
    if arguments == "kept":
        arguments = ("store_param_remainders" in FORMATS[format],)
    for param in params:
        optimizer.initialize_state(param, *arguments)
        optimizer.initialize_state(param, *arguments)  # the second time does nothing
    for param in params:
        assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq", "master_param"}
        assert not optimizer.get_unscaled_state(param, "exp_avg").any()
        master = optimizer.get_unscaled_state(param, "master_param")
        if "store_param_remainders" in FORMATS[format]:
            assert not master.any()
        else:
            assert_same_bits(master, param.float())
    twins, fresh = make(device, format, steps=0)
    train(optimizer, params, range(2))
    train(fresh, twins, range(2))
    assert_same_training(optimizer, params, fresh, twins)


def test_initialize_state_with_another_flag_is_refused(device: torch.device) -> None:
    params, optimizer = make(device, "fp32", steps=0)
    with pytest.raises(ValueError, match="store_param_remainders=True"):
        optimizer.initialize_state(params[0], True)
    params, optimizer = make(device, "remainder", steps=0)
    with pytest.raises(ValueError, match="store_param_remainders=False"):
        optimizer.initialize_state(params[0], False)
    assert len(optimizer.state[params[0]]) == 0


def test_initialize_state_lays_all_parameters_out_together(device: torch.device) -> None:
    params, optimizer = make(device, "fp32", steps=0)
    for param in reversed(params):
        optimizer.initialize_state(param)
    addresses = [optimizer.state[param]["exp_avg"].data_ptr() for param in params]
    assert [address - addresses[0] for address in addresses] == [0, 128 * 4, 3 * 128 * 4]


UNSCALED = {
    ("fp32", "exp_avg"): (torch.float32, True),
    ("fp32", "master_param"): (torch.float32, True),
    ("remainder", "exp_avg"): (torch.float32, True),
    ("remainder", "exp_avg_sq"): (torch.float32, False),
    ("remainder", "master_param"): (torch.int16, True),
    ("fp16", "exp_avg"): (torch.float32, False),
    ("fp16", "exp_avg_sq"): (torch.float32, False),
    ("fp16", "master_param"): (torch.float32, False),
    ("uint8", "exp_avg"): (torch.float32, False),
    ("uint8", "exp_avg_sq"): (torch.float32, False),
    ("uint8", "master_param"): (torch.int16, True),
}


@pytest.mark.parametrize(("format", "key"), UNSCALED)
def test_get_unscaled_state(device: torch.device, format: str, key: str) -> None:
    dtype, live = UNSCALED[format, key]
    params, optimizer = make(device, format)
    for param in params:
        raw = optimizer.state[param][key]
        found = optimizer.get_unscaled_state(param, key)
        assert found.dtype == dtype
        assert found.shape == param.shape
        assert found.device.type == "cpu"
        assert (found.data_ptr() == raw.data_ptr()) == live
        assert optimizer.get_unscaled_state(param, key, skip_unscale=True).data_ptr() == raw.data_ptr()
        if raw.dtype == torch.bfloat16:
            assert_same_bits(found, raw.float())


def test_get_unscaled_state_of_nothing(device: torch.device) -> None:
    params, optimizer = make(device, "fp32", steps=0)
    with pytest.raises(KeyError, match="no 'exp_avg' state"):
        optimizer.get_unscaled_state(params[0], "exp_avg")
    assert len(optimizer.state) == 0
    train(optimizer, params, range(1))
    with pytest.raises(KeyError, match="no 'step' state"):
        optimizer.get_unscaled_state(params[0], "step")


@each_format
def test_set_scaled_state(device: torch.device, format: str) -> None:
    params, optimizer = make(device, format, steps=0)
    values = torch.rand(3, 43) + 0.5
    for key in MOMENTS:
        optimizer.set_scaled_state(params[1], key, values.to(device))
    found = optimizer.get_unscaled_state(params[1], "exp_avg")
    if format == "fp16":
        torch.testing.assert_close(found, values, rtol=2.0**-11, atol=0)
    # Half of the largest step, from (126 / 127)**4 to 1 of a largest value of 1.5.
    elif format == "uint8":
        torch.testing.assert_close(found, values, rtol=0, atol=1.5 * 2 / 127)
    else:
        assert_same_bits(found, values)
    optimizer.set_scaled_state(params[1], "exp_avg", found)  # what was read can be written
    assert_same_bits(optimizer.get_unscaled_state(params[1], "exp_avg"), found)
    with pytest.raises(ValueError, match=r"shape \(3, 43\)"):
        optimizer.set_scaled_state(params[1], "exp_avg", torch.zeros(129))
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        optimizer.set_scaled_state(params[1], "max_exp_avg_sq", values)
    if "store_param_remainders" in FORMATS[format]:
        with pytest.raises(TypeError, match=r"torch\.int16, but got torch\.float32"):
            optimizer.set_scaled_state(params[1], "master_param", values)
    else:
        with pytest.raises(TypeError, match=r"but got torch\.int16"):
            optimizer.set_scaled_state(params[1], "master_param", torch.zeros(3, 43, dtype=torch.int16))


def test_set_scaled_state_makes_a_master_authoritative(device: torch.device) -> None:
    params, optimizer = make(device, "fp32", steps=0)
    optimizer.set_scaled_state(params[0], "master_param", torch.full((5,), 3.25 + 2.0**-15))
    step_without_lr(optimizer, params)
    assert params[0].tolist() == [3.25] * 5
    assert optimizer.state[params[0]]["master_param"].tolist() == [3.25 + 2.0**-15] * 5


def test_a_template_that_was_filled_is_taken(device: torch.device) -> None:
    """A checkpoint reader fills the tensors of get_unscaled_state, then hands the same tensors to
    set_scaled_state.
    """
    params, optimizer = make(device, "fp32")
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    loaded = FusedOffloadAdam(twins, **HYPERPARAMETERS, **FORMATS["fp32"])
    for param, twin in zip(params, twins, strict=True):
        loaded.initialize_state(twin)
        for key in optimizer.state[param]:
            template = loaded.get_unscaled_state(twin, key)
            template.copy_(optimizer.get_unscaled_state(param, key))
            loaded.set_scaled_state(twin, key, template)
    loaded.param_groups[0]["step"] = 2
    assert_same_training(optimizer, params, loaded, twins)


# -- parameters that change behind the optimizer's back --------------------------------------------


TOUCHES: dict[str, Callable[[FusedOffloadAdam, list[Any]], Any]] = {
    "nothing": lambda optimizer, params: None,
    "initialize_state": lambda optimizer, params: [optimizer.initialize_state(param) for param in params],
    "state_dict": lambda optimizer, params: optimizer.state_dict(),
    "reading moments": lambda optimizer, params: [optimizer.state[param]["exp_avg"] for param in params],
    "reading templates": lambda optimizer, params: [
        optimizer.get_unscaled_state(param, key) for param in params for key in optimizer.state[param]
    ],
    "writing moments": lambda optimizer, params: [
        optimizer.set_scaled_state(param, "exp_avg", torch.zeros(param.shape)) for param in params
    ],
}


@each_format
@pytest.mark.parametrize("touch", TOUCHES)
def test_weights_loaded_before_the_first_step_are_kept(device: torch.device, format: str, touch: str) -> None:
    params, optimizer = make(device, format, steps=0)
    if touch != "nothing":
        TOUCHES["initialize_state"](optimizer, params)
    TOUCHES[touch](optimizer, params)
    assert_steps_start_from_loaded_weights(device, optimizer, params)


def assert_steps_start_from_loaded_weights(
    device: torch.device, optimizer: FusedOffloadAdam, params: list[torch.nn.Parameter]
) -> None:
    weights = make_params(device, seed=9)
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    step_without_lr(optimizer, params)
    for param, weight in zip(params, weights, strict=True):
        assert_same_bits(param, weight)


RELOADS = {
    "bf16, fp32 masters": (torch.bfloat16, torch.float32, False),
    "fp16, fp32 masters": (torch.float16, torch.float32, False),
    "fp32, fp32 masters": (torch.float32, torch.float32, False),
    "bf16, fp16 masters": (torch.bfloat16, torch.float16, False),
    "fp16, fp16 masters": (torch.float16, torch.float16, False),
    "bf16, remainders": (torch.bfloat16, torch.float32, True),
}
each_reload = pytest.mark.parametrize("kind", RELOADS)


def make_reload(device: torch.device, kind: str) -> tuple[list[Any], FusedOffloadAdam]:
    dtype, master_dtype, remainders = RELOADS[kind]
    generator = torch.Generator().manual_seed(4)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(device, dtype)) for n in (5, 129, 3000)]
    optimizer = FusedOffloadAdam(
        params,
        master_weights=True,
        master_weight_dtype=master_dtype,
        store_param_remainders=remainders,
        **HYPERPARAMETERS,
    )
    train(optimizer, params, range(3))
    return params, optimizer


@each_reload
def test_reloading_after_a_true_resume_loses_nothing(device: torch.device, kind: str) -> None:
    params, optimizer = make_reload(device, kind)
    twins, undisturbed = make_reload(device, kind)
    optimizer.reload_model_params()
    assert_same_training(optimizer, params, undisturbed, twins)
    resumed_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    _, master_dtype, remainders = RELOADS[kind]
    resumed = FusedOffloadAdam(
        resumed_params, master_weights=True, master_weight_dtype=master_dtype, store_param_remainders=remainders
    )
    resumed.load_state_dict(optimizer.state_dict())
    resumed.reload_model_params()
    assert_same_training(optimizer, params, resumed, resumed_params)


@each_reload
def test_reloading_takes_changed_weights_over(device: torch.device, kind: str) -> None:
    params, optimizer = make_reload(device, kind)
    moments = [{key: bits(optimizer.state[param][key]) for key in MOMENTS} for param in params]
    masters = [optimizer.get_unscaled_state(param, "master_param").clone() for param in params]
    with torch.no_grad():
        for param in params[1:]:
            param.mul_(-1.5)  # the rounding of no master
    weights = [param.detach().clone() for param in params]
    optimizer.reload_model_params()
    for param, found in zip(params, moments, strict=True):
        for key in MOMENTS:
            assert torch.equal(bits(optimizer.state[param][key]), found[key])
    assert optimizer.param_groups[0]["step"] == 3
    # The master was not changed.
    assert_same_bits(optimizer.get_unscaled_state(params[0], "master_param"), masters[0])
    if RELOADS[kind][2]:  # kept: the master is within half a bfloat16 step of the new parameter
        for param, master in zip(params, masters, strict=True):
            remainder = optimizer.get_unscaled_state(param, "master_param")
            assert_same_bits(remainder, master)
            error = (join_remainder(param.detach().cpu(), remainder) - param.detach().cpu()).abs()
            assert (error <= param.detach().cpu().abs() * 2.0**-8).all()
    else:
        for param in params[1:]:
            assert_same_bits(optimizer.get_unscaled_state(param, "master_param"), param.float())
    step_without_lr(optimizer, params)
    for param, weight in zip(params[1:], weights[1:], strict=True):
        assert_same_bits(param, weight)


def test_reloading_finds_small_changes(device: torch.device) -> None:
    """One step of bfloat16 up and down; not a change at all where a tie was rounded away from
    zero.
    """
    param = torch.nn.Parameter(torch.full((4,), 1.5, dtype=torch.bfloat16, device=device))
    optimizer = FusedOffloadAdam([param], master_weights=True)
    # The last two are ties.
    masters = torch.tensor([1.5, 1.5 + 2.0**-9, 1.5 + 2.0**-8, 1.5 + 2.0**-8])
    optimizer.set_scaled_state(param, "master_param", masters)
    with torch.no_grad():
        param.copy_(torch.tensor([1.5 + 2.0**-7, 1.5 - 2.0**-7, 1.5, 1.5 + 2.0**-7]))
    optimizer.reload_model_params()
    expected = [1.5 + 2.0**-7, 1.5 - 2.0**-7, 1.5 + 2.0**-8, 1.5 + 2.0**-8]
    assert optimizer.state[param]["master_param"].tolist() == expected


def test_reloading_finds_tiny_weights_behind_zero_masters(device: torch.device) -> None:
    """A stored zero is exact to the smallest number of its block, not to the smallest of numbers
    near one.
    """
    values = torch.zeros(128)
    values[0] = 1.0
    param = torch.nn.Parameter(values.to(device, torch.bfloat16))
    optimizer = FusedOffloadAdam([param], master_weights=True, master_weight_dtype=torch.float16)
    optimizer.set_scaled_state(param, "master_param", values)
    with torch.no_grad():
        param[1] = 2.0**-30
    optimizer.reload_model_params()
    assert optimizer.get_unscaled_state(param, "master_param")[1] == 2.0**-30


def test_reloading_keeps_unset_masters_unset(device: torch.device) -> None:
    params, optimizer = make(device, "fp32", steps=0)
    for param in params:
        optimizer.initialize_state(param)
    optimizer.reload_model_params()
    assert_steps_start_from_loaded_weights(device, optimizer, params)


@each_format
def test_storage_that_was_moved_as_a_whole_comes_home(device: torch.device, format: str) -> None:
    """Sending a view to another process moves its storage into shared memory; steps lose neither it
    nor its scales.
    """
    params, optimizer = make(device, format)
    twins, reference = make(device, format)
    views = list(optimizer.state[params[1]].values())
    addresses = [view.data_ptr() for view in views]
    for view in views:
        view.share_memory_()
    if torch.device("cpu") in {view.device for view in views}:
        assert all(view.data_ptr() != address for view, address in zip(views, addresses, strict=True))
    if format != "uint8":  # whose elements are no numbers
        for entry in (optimizer.state[params[1]], reference.state[twins[1]]):
            entry["exp_avg"].mul_(0.5)
    train(optimizer, params, range(2, 3))
    train(reference, twins, range(2, 3))
    assert [view.data_ptr() for view in optimizer.state[params[1]].values()] == addresses
    assert_same_training(optimizer, params, reference, twins)


def test_views_that_require_no_gradient_are_not_frozen(device: torch.device) -> None:
    """Shards of a flat buffer are plain views: they share an extent, and have state even while they
    lack a gradient.
    """
    buffer = torch.ones(1024, device=device)
    shards = [buffer[:256].detach(), buffer[512:].detach()]
    optimizer = FusedOffloadAdam(shards)
    shards[0].grad = torch.ones_like(shards[0])
    optimizer.step()
    extents = {id(optimizer.state[shard].storage.extent) for shard in shards}
    assert len(extents) == 1
    assert set(optimizer.state[shards[1]]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_that_are_loaded_over_remainders_stay_numbers(zero: float) -> None:
    """The pair of a zero and a negative remainder belongs to no master, and would be joined to
    NaN.
    """
    param = torch.nn.Parameter(torch.linspace(-1, 1, 300).bfloat16())
    optimizer = FusedOffloadAdam([param], lr=1e-3, master_weights=True, store_param_remainders=True)
    for _ in range(3):
        param.grad = torch.linspace(-0.3, 0.4, 300).bfloat16()
        optimizer.step()
    remainders = optimizer.state[param]["master_param"].clone()
    assert (remainders < 0).any()
    with torch.no_grad():
        param[::2] = zero
    optimizer.reload_model_params()
    kept = optimizer.state[param]["master_param"]
    assert torch.equal(kept[1::2], remainders[1::2])
    assert (kept[::2] >= 0).all()
    optimizer.step()
    assert param.isfinite().all()


def test_without_master_weights_there_is_no_remainder_either() -> None:
    """Wrappers set both attributes after construction."""
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = FusedOffloadAdam([param], master_weights=True, store_param_remainders=True)
    optimizer.master_weights = False
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
