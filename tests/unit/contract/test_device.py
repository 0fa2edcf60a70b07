"""The device record: what it must say of itself, and torch's defaults for it."""

from __future__ import annotations

import json
import types

import pytest
import torch

from lmcore.base.errors import DeviceError, PluginError
from lmcore.contract import API_VERSION, Compilations, Device, MemoryStats, torch_versions
from lmcore.contract.torch_device import defaults, own_index
from lmcore.contract.torch_versions import NEWEST, OLDEST

OPTIONAL = ("memory_stats", "reset_peak_memory", "empty_cache", "pin_memory", "new_stream",
            "new_event", "peak_flops")  # fmt: skip


def make(**more):
    values = {
        "type": "chip", "index": 1, "name": "Chip", "dtypes": frozenset({"float32"}),
        "synchronize": lambda: None, "set_current": lambda: None, "seed": lambda seed: None,
        "get_rng_state": lambda: None, "set_rng_state": lambda state: None,
        "missing": {name: "the chip has none" for name in OPTIONAL if name not in more},
    }  # fmt: skip
    return Device(**(values | more))


def test_a_missing_ability_needs_a_reason():
    """Leaving an ability out in silence is an error of the plugin."""
    with pytest.raises(PluginError, match="lacks `new_event`"):
        make(missing={name: "none" for name in OPTIONAL if name != "new_event"})


def test_an_ability_cannot_be_there_and_missing():
    """Both at once is a contradiction."""
    with pytest.raises(PluginError, match="has `empty_cache` and calls it missing"):
        make(empty_cache=lambda: None, missing=dict.fromkeys(OPTIONAL, "none"))


def test_require_gives_the_function_or_the_plugins_reason():
    """The core asks for an ability and gets a function or an error in words."""

    def stats():
        return MemoryStats(1, 2, 3, None)

    device = make(memory_stats=stats)
    assert device.require("memory_stats") is stats
    with pytest.raises(DeviceError, match="no `new_stream`") as error:
        device.require("new_stream")
    assert error.value.why == "the chip has none"


def test_describe_is_json():
    """The record's data goes into files."""
    found = json.loads(json.dumps(make(memory_stats=lambda: None, facts={"cores": 2}).describe()))
    assert found["abilities"] == ["memory_stats"]
    assert found["missing"]["new_event"] == "the chip has none"
    assert found["facts"] == {"cores": 2}


def raising():
    raise OSError("no answer\nfrom the driver")


@pytest.mark.parametrize(
    "health, problem",
    [
        (None, None),
        (lambda: None, None),
        (lambda: "42 uncorrectable errors", "42 uncorrectable errors"),
        (raising, "its health cannot be read: OSError: no answer"),
    ],
)
def test_the_health_of_a_device(health, problem):
    """A device that cannot be asked is not healthy; without a check nothing is known."""
    assert make(health=health).health_problem() == problem


def test_health_is_text_or_none():
    """True for healthy would be taken for a fault, or the other way round."""
    with pytest.raises(PluginError, match="returned True from `health`"):
        make(health=lambda: True).health_problem()


def test_compilations_of_a_device():
    """A device that compiles says how much; for any other the answer is None."""
    assert make().compiled_so_far() is None
    early, late = Compilations(2, 1.5), Compilations(5, 9.0)
    assert make(compilations=lambda: late).compiled_so_far() == late
    assert late.since(early) == Compilations(3, 7.5)
    with pytest.raises(PluginError, match="returned 12 from `compilations`"):
        make(compilations=lambda: 12).compiled_so_far()


def test_an_attribute_of_a_later_contract_is_named(chip_module):
    """A plugin for a later contract that promises this one, too, has an error that says so."""
    with pytest.raises(PluginError, match="`Device` has no attribute `telepathy`") as error:
        Device.from_torch("chip", telepathy=lambda: None)
    assert API_VERSION in error.value.why


def test_the_host_has_no_ordinal():
    """Torch calls the CPU `cpu`, and tensors there compare equal to it."""
    assert make(type="cpu", index=0).torch_device == torch.device("cpu")
    assert make(type="meta", index=1).torch_device == torch.device("meta", 1)


@pytest.fixture
def chip_module(monkeypatch):
    """A device module like a vendor's, for a type that torch knows by name."""
    calls = []
    module = types.SimpleNamespace(
        synchronize=lambda device: calls.append(("synchronize", device)),
        set_device=lambda device: calls.append(("set_device", device)),
        manual_seed=lambda seed: calls.append(("seed", seed)),
        get_rng_state=lambda device: calls.append(("get", device)),
        set_rng_state=lambda state, device: calls.append(("set", state, device)),
        get_device_name=lambda index: f"Chip {index}",
        memory_allocated=lambda device: 1,
        max_memory_allocated=lambda device: 2,
        memory_reserved=lambda device: 3,
        mem_get_info=lambda device: (4, 5),
        empty_cache=lambda: calls.append("empty"),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    return module, calls


def test_defaults_come_from_torchs_device_module(chip_module):
    """The module's functions are used for this ordinal; an absent one is missing, with its name."""
    _, calls = chip_module
    device = Device.from_torch("meta", 3, dtypes=frozenset({"float32", "float16"}))
    device.synchronize()
    device.set_current()
    device.seed(7)
    device.get_rng_state()
    device.set_rng_state("state")
    device.require("empty_cache")()
    assert calls == [
        ("synchronize", 3), ("set_device", 3), ("seed", 7), ("get", 3),
        ("set", "state", 3), "empty",
    ]  # fmt: skip
    assert device.name == "Chip 3"
    assert device.memory_stats() == MemoryStats(1, 2, 3, 5)
    assert set(device.missing) == {
        "reset_peak_memory", "pin_memory", "new_stream", "new_event", "peak_flops", "new_graph"
    }  # fmt: skip
    assert "`reset_peak_memory_stats`" in device.missing["reset_peak_memory"]


@pytest.fixture
def accelerator(chip_module, monkeypatch):
    """A device module with random numbers only; `torch.accelerator` has everything else."""
    module, calls = chip_module
    for name in vars(module).copy():
        if "rng" not in name and name not in {"manual_seed", "get_device_name"}:
            delattr(module, name)

    def functions(**results):
        for name, result in results.items():
            function = lambda *index, name=name, result=result: (  # noqa: E731
                calls.append((name, *index)) or result
            )
            monkeypatch.setattr(torch.accelerator, name, function, raising=False)

    functions(
        current_accelerator=torch.device("meta"), device_count=2, synchronize=None,
        set_device_index=None, memory_allocated=1, max_memory_allocated=2, memory_reserved=3,
        get_memory_info=(4, 5), reset_peak_memory_stats=None, empty_cache=None,
        current_stream="compute",
    )  # fmt: skip
    monkeypatch.setattr(torch, "Stream", lambda device: ("stream", device))
    event = types.SimpleNamespace(record=lambda stream: calls.append(("record", stream)))
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: ("pinned", tensor))
    return module, calls


def test_torch_accelerator_has_what_the_device_module_lacks(accelerator, monkeypatch):
    """Each function is `torch.accelerator`'s, with the ordinal as an integer."""
    _, calls = accelerator
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = Device.from_torch("meta")
    assert device.index == 1
    calls.clear()
    device.synchronize()
    device.set_current()
    device.reset_peak_memory()
    device.empty_cache()
    assert [call for call in calls if call[0] != "current_accelerator"] == [
        ("synchronize", 1), ("set_device_index", 1), ("reset_peak_memory_stats", 1),
        ("empty_cache",),
    ]  # fmt: skip
    assert device.memory_stats() == MemoryStats(1, 2, 3, 5)
    assert device.new_stream() == ("stream", torch.device("meta", 1))
    assert device.pin_memory(torch.ones(1))[0] == "pinned"
    assert set(device.missing) <= {"peak_flops", "new_graph"}


@pytest.mark.parametrize(
    "function, lacking",
    [
        ("memory_allocated", {"memory_stats"}),
        ("reset_peak_memory_stats", {"reset_peak_memory"}),
        ("empty_cache", {"empty_cache"}),
        ("Stream", {"new_stream"}),
        ("current_stream", {"new_event"}),
        ("pin_memory", {"pin_memory"}),
        ("get_memory_info", set()),
    ],
)
def test_what_torch_accelerator_cannot_do_is_missing(accelerator, monkeypatch, function, lacking):
    """`torch.accelerator` has each function for every device, and raises: this is the reason."""

    def raises(*_):
        raise RuntimeError("not on this device\nC++ frames")

    owner = {"Stream": torch, "pin_memory": torch.Tensor}.get(function, torch.accelerator)
    monkeypatch.setattr(owner, function, raises)
    device = Device.from_torch("meta", 0)
    assert set(device.missing) - {"peak_flops", "new_graph"} == lacking
    for ability in lacking:
        assert device.missing[ability] == "not on this device"
    if function == "get_memory_info":
        assert device.memory_stats().total is None


def test_a_function_of_every_device_that_raises_is_the_plugins_to_bring(accelerator, monkeypatch):
    """The reason is torch's; nothing is tried if the plugin brings the function."""

    def raises(*_):
        raise NotImplementedError("no streams here")

    monkeypatch.setattr(torch.accelerator, "synchronize", raises)
    with pytest.raises(PluginError, match="has no `synchronize`") as error:
        Device.from_torch("meta", 0)
    assert error.value.why == "no streams here"
    assert "`synchronize=`" in error.value.hint
    assert Device.from_torch("meta", 0, synchronize=print).synchronize is print


def test_another_types_accelerator_is_not_used(accelerator, monkeypatch):
    """`torch.accelerator` works on its own device type alone."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(PluginError, match="has no `synchronize`") as error:
        Device.from_torch("meta", 0)
    assert error.value.why == "torch's module of `meta` has no `synchronize`"


def test_overrides_win_and_take_their_reasons_along(chip_module):
    """A plugin's own function replaces the default; its reasons for gaps are merged."""
    device = Device.from_torch(
        "meta", 0, peak_flops=lambda dtype: 1.0, empty_cache=None, missing={"empty_cache": "ours"}
    )
    assert device.require("peak_flops")("float32") == 1.0
    assert "peak_flops" not in device.missing
    assert device.missing["empty_cache"] == "ours"


def test_defaults_do_not_invent_what_torch_does_not_have(chip_module):
    """A module without memory functions gives no memory statistics."""
    module, _ = chip_module
    del module.memory_allocated
    assert "memory_stats" not in defaults("meta", 0)


@pytest.mark.parametrize("count, hint", [(2, "at most 2 processes"), (0, "lmcore doctor")])
def test_a_process_without_a_device_is_an_error(chip_module, monkeypatch, count, hint):
    """A local rank beyond the devices that torch sees is an error; one below them is the index."""
    module, _ = chip_module
    monkeypatch.setattr(module, "device_count", lambda: count, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(DeviceError, match="process 2 of this host has no `meta` device") as error:
        own_index("meta")
    assert error.value.why == f"torch sees {count}"
    assert hint in error.value.hint
    monkeypatch.setattr(module, "device_count", lambda: 3, raising=False)
    assert own_index("meta") == 2


def test_the_index_is_the_local_rank_by_default(chip_module, monkeypatch):
    """A plugin need not know how processes share a host's devices."""
    module, _ = chip_module
    monkeypatch.setattr(module, "device_count", lambda: 3, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert Device.from_torch("meta").index == 2


def test_the_host_can_be_a_device_by_defaults(monkeypatch):
    """It has a generator and nothing to wait for; all processes of a host have it as one."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = Device.from_torch("cpu")
    assert (device.torch_device, device.index) == (torch.device("cpu"), 0)
    before = device.get_rng_state()
    device.seed(5)
    first = torch.rand(3)
    device.seed(5)
    assert torch.equal(torch.rand(3), first)
    device.set_rng_state(before)
    assert torch.equal(device.get_rng_state(), before)
    device.synchronize()
    device.set_current()
    assert {"pin_memory", "new_stream", "new_event", "memory_stats"} <= set(device.missing)


def test_a_function_of_every_device_is_required_by_name(chip_module):
    """A function that torch's module lacks is passed by the plugin, or the error names it."""
    module, _ = chip_module
    del module.get_rng_state
    with pytest.raises(PluginError, match="has no `get_rng_state`") as error:
        Device.from_torch("meta", 0)
    assert "`get_rng_state=`" in error.value.hint
    own = Device.from_torch("meta", 0, get_rng_state=lambda: "mine")
    assert own.get_rng_state() == "mine"


@pytest.mark.parametrize("index", [None, 0])
def test_an_unknown_device_type_is_a_device_error(index):
    """The message says that a package may have to be imported first."""
    with pytest.raises(DeviceError, match="has no device type `nosuch`") as error:
        Device.from_torch("nosuch", index)
    assert "import the package" in error.value.hint


def test_a_type_without_a_module_of_torch(monkeypatch):
    """Its plugin brings what every device has; optional functions are missing, with the reason."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(PluginError, match="device `xla` has no `synchronize`") as error:
        Device.from_torch("xla")
    assert error.value.why == "torch has no module `torch.xla`"
    names = ("synchronize", "set_current", "seed", "get_rng_state", "set_rng_state")
    assert all(f"`{name}=`" in error.value.hint for name in names)
    assert "import the package" in error.value.hint
    device = Device.from_torch("xla", **dict.fromkeys(names, lambda: None))
    assert (device.type, device.index, device.name) == ("xla", 3, "xla")
    assert device.missing["memory_stats"] == "torch has no module `torch.xla`"


def test_defaults_of_a_device_that_computes_at_once():
    """It has no step boundary, inference mode, and torch's backend of compilation."""
    device = Device.from_torch("cpu")
    assert device.step_boundary() is None
    assert (device.inference_mode, device.compile_backend) == (True, None)


def test_plugins_of_before_say_nothing_of_graphs():
    """Abilities added after version 1.0 may be missing without a reason; a given reason is kept."""
    assert make().missing["new_graph"]
    reasons = dict.fromkeys([*OPTIONAL, "new_graph"], "none here")
    assert make(missing=reasons).missing["new_graph"] == "none here"
    has = make(new_graph=lambda: None)
    assert "new_graph" not in has.missing
    assert "new_graph" in has.describe()["abilities"]


def test_a_graph_of_the_plugins_own_is_enough(chip_module, monkeypatch):
    """Torch's is tried, as not every device has it, unless the plugin brings one."""
    monkeypatch.setattr(torch_versions, "_installed", lambda: NEWEST)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "Graph", lambda: 1 / 0, raising=False)
    own = object
    assert Device.from_torch("meta", 0, new_graph=own).new_graph is own
    with pytest.raises(ZeroDivisionError):
        Device.from_torch("meta", 0)
    monkeypatch.setattr(torch.accelerator, "Graph", object)
    assert Device.from_torch("meta", 0).new_graph is object
    monkeypatch.setattr(torch_versions, "_installed", lambda: OLDEST)
    reason = Device.from_torch("meta", 0).missing["new_graph"]
    assert reason.startswith(f"torch {OLDEST} has no graph class")


def test_why_torch_has_no_graph_for_a_device(chip_module, monkeypatch):
    """The reason names torch's class and its accelerator, also if that is another device."""
    monkeypatch.setattr(torch_versions, "_installed", lambda: NEWEST)
    monkeypatch.setattr(torch.accelerator, "Graph", object, raising=False)

    def reason(current):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
        return Device.from_torch("meta", 0).missing["new_graph"]

    alone = "torch captures graphs of its current accelerator alone (`torch.accelerator.Graph`); "
    assert reason(None) == f"{alone}there is none here"
    assert reason(torch.device("cuda")) == f"{alone}here that is `cuda`, not `meta`"

    def raises():
        raise RuntimeError("graphs are not supported\nC++ frames")

    monkeypatch.setattr(torch.accelerator, "Graph", raises)
    found = reason(torch.device("meta"))
    assert found == "`torch.accelerator.Graph` cannot be made for `meta`: graphs are not supported"
