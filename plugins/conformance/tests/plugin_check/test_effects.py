"""Wrong plugins whose hooks answer rightly, and that change the process of the command."""

from __future__ import annotations

import pytest

ABSENT = """
@hookimpl
def lmcore_plugin_info():
    return PluginInfo("guest", ">=1.3,<2", provides=("guest",))

@hookimpl
def lmcore_probe(env):
    return Probe("guest", ProbeState.ABSENT, evidence=("no /dev/guest0",))

@hookimpl
def lmcore_create_device(): ...
"""
PRESENT = """
@hookimpl
def lmcore_plugin_info():
    return PluginInfo("guest", ">=1.3,<2", provides=("cpu",))

@hookimpl
def lmcore_probe(env):
    return Probe("cpu", ProbeState.PRESENT, 1, evidence=("the host",))

@hookimpl
def lmcore_create_device():
    change()
    return Device.from_torch("cpu", dtypes=frozenset({"float32"}))
"""


def details(found, status="failed"):
    """Return the details of the lines with a status, by the name of the line."""
    (plugin,) = found["plugins"]
    names = dict.fromkeys(line["name"] for line in plugin["checks"] if line["status"] == status)
    return {
        name: [line["detail"] for line in plugin["checks"] if line["name"] == name]
        for name in names
    }


def unlike(faults, *wanted):
    """Return the faults that no wanted text is in, and the wanted texts that are in none."""
    strange = [fault for fault in faults if not any(text in fault for text in wanted)]
    return strange + [text for text in wanted if not any(text in fault for fault in faults)]


def test_an_import_that_changes_the_process(install, check):
    """Output, time, variables, functions, settings, hooks of imports and threads are each named."""
    install(
        ABSENT,
        """
        import importlib.abc, json, logging, signal, threading

        print("guest", "1.0")
        os.environ["GUEST_HOME"] = "/opt/guest"
        os.putenv("GUEST_CACHE", "1")
        time.sleep(1.5)
        real = json.dumps
        json.dumps = lambda *given, **named: real(*given, **named)
        logging.getLogger().setLevel(logging.DEBUG)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        sys.meta_path.insert(0, type("Finder", (importlib.abc.MetaPathFinder,), {})())
        os.chdir("/")
        """,
    )
    status, found = check("guest")
    assert status == 1
    failed = details(found)
    assert set(failed) == {"import time", "import effects"}
    (slow,) = failed["import time"]
    assert "the limit is 0.5 s; it waits for 1.5" in slow
    assert not unlike(
        failed["import effects"],
        "it prints to standard output, which belongs to the command: 'guest 1.0\\n'",
        "it changes the environment variable `GUEST_CACHE`",
        "it changes the environment variable `GUEST_HOME`",
        "`json.dumps` is replaced by a function of guest_plugin.py, line ",
        "it changes the level of the root logger from 30 to 10",
        "it changes the handler of SIGUSR1",
        "it changes the working directory",
        "it changes `sys.meta_path`",
        "1 thread stays",
    )


def test_a_probe_that_is_slow_and_changes_the_process(install, check):
    """Output of a child process counts, and so does a function of lmcore."""
    install(
        ABSENT.replace("    return Probe", "    slowly()\n    return Probe"),
        """
        def slowly():
            import subprocess, lmcore.base.errors
            subprocess.run([sys.executable, "-c", "print('one chip')"])
            time.sleep(2.2)
            os.environ["GUEST_VISIBLE"] = str(time.time())
            lmcore.base.errors.counted = lambda count, word: f"{count} {word}"
        """,
    )
    _, found = check("guest")
    failed = details(found)
    assert set(failed) == {"probe effects"}
    assert not unlike(
        failed["probe effects"],
        "it prints to standard output, which belongs to the command: 'one chip\\n",
        "it changes the environment variable `GUEST_VISIBLE`",
        "`lmcore.base.errors.counted` is replaced by a function of guest_plugin.py",
        "s, and the limit is 2 s",
    )


def test_another_hook_of_the_launcher(install, check):
    """A registration that every command makes is watched like the import and the probe."""
    install(
        ABSENT,
        """
        @hookimpl
        def lmcore_add_corpora(registry):
            time.sleep(0.7)
            print("two corpora")
        """,
    )
    _, found = check("guest")
    failed = details(found)
    assert set(failed) == {"launcher hooks"}
    assert not unlike(failed["launcher hooks"], "s, and the limit is 0.5 s", "'two corpora\\n")


@pytest.mark.parametrize("place", ["import", "probe"])
def test_a_fork_is_named(install, check, place):
    """The copy of the process ends, and its line is named."""
    fork = "os.fork() and os.wait()\n"
    if place == "import":
        install(ABSENT, fork)
    else:
        install(ABSENT.replace("    return Probe", f"    {fork}    return Probe"))
    status, found = check("guest")
    assert status == 1
    (plugin,) = found["plugins"]
    names = [line["name"] for line in plugin["checks"]]
    assert sorted(names) == sorted(set(names))
    line = {"import": "import effects", "probe": "lmcore_probe"}[place]
    (fault,) = details(found)[line]
    assert "fork" in fault
    assert "(guest_plugin.py, line " in fault


def test_a_device_that_changes_torch(install, check):
    """Replaced functions, methods and code, kernels of the CPU and settings are each named."""
    install(
        PRESENT,
        """
        KEPT = []

        def change():
            import torch
            from torch.nn import functional

            functional.dropout = lambda x, p=0.5, training=True, inplace=False: x
            functional.celu = functional.elu
            torch.Tensor.matmul = lambda self, other: torch.matmul(self, other)
            functional.gelu_ = functional.gelu
            functional.glu.__defaults__ = (0,)
            torch.nn.Linear.forward = lambda self, x: functional.linear(x, self.weight, self.bias)
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(12)
            torch.use_deterministic_algorithms(True)
            torch.backends.mkldnn.deterministic = True
            torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
            KEPT.append(torch.library.Library("aten", "IMPL"))
            KEPT[0].impl("hardswish", lambda x: x, "CPU")
            os.environ["GUEST_VISIBLE"] = "0"
        """,
    )
    _, found = check("guest")
    failed = details(found)
    create = "`lmcore_create_device`: "
    assert not unlike(
        failed["hook effects"],
        f"{create}it changes torch's default dtype from 'torch.float32' to 'torch.float64'",
        f"{create}it changes the seed of torch's CPU generator",
        f"{create}it changes torch's deterministic mode from False to True",
        f"{create}it changes `torch.backends.mkldnn.deterministic` from False to True",
        f"{create}it changes the number of torch's global module hooks from 0 to 1",
        f"{create}it changes the number of kernels that replace torch's own on the CPU",
        f"{create}it changes the environment variable `GUEST_VISIBLE`",
        "`torch.Storage` is replaced",  # with the default dtype
        "`torch.nn.functional.dropout` is replaced by a function of guest_plugin.py, line ",
        "`torch.nn.functional.celu` is replaced by a function of functional.py, line ",
        "`torch.nn.functional.glu` is replaced",
        "`torch.Tensor.matmul` is replaced by a function of guest_plugin.py, line ",
        "`torch.nn.modules.linear.Linear.forward` is replaced by a function of guest_plugin.py,",
    )


def test_a_plugin_that_waits_for_torch(install, check):
    """A plugin that patches torch where it is loaded already is found with torch loaded."""
    install(
        ABSENT,
        """
        if "torch" in sys.modules:
            sys.modules["torch"].nn.functional.dropout = lambda x, *_, **__: x
        """,
    )
    _, found = check("guest")
    failed = details(found)
    assert set(failed) == {"discovery"}
    assert not unlike(
        failed["discovery"],
        "where torch is loaded already, `torch.nn.functional.dropout` is replaced by a function",
    )


def test_private_modules_by_computed_names(install, check):
    """The names that were imported are reported like names in a file."""
    install(
        ABSENT.replace("    return Probe", "    load()\n    return Probe"),
        """
        import importlib

        def load():
            importlib.import_module(".".join(("lmcore", "base", "thr" + "eads")))
            __import__("23crc.esab.erocml"[::-1])
            exec("from lmcore" + ".base.durable import machine")
            importlib.import_module(".".join(("lmcore", "base", "errors")))
        """,
    )
    status, found = check("guest")
    assert status == 1
    failed = details(found)
    assert set(failed) == {"source"}
    private = [detail for detail in failed["source"] if "is private: version " in detail]
    assert not unlike(
        private,
        "`lmcore.base.threads` (guest_plugin.py, line ",
        "`lmcore.base.crc32` (guest_plugin.py, line ",
        "`lmcore.base.durable.machine` (guest_plugin.py, line ",
    )
    status, found = check("guest", "--allow-private")
    assert status == 0
    assert set(details(found, "warning")) == {"source"}
