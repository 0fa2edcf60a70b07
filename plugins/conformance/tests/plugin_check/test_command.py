"""`lmcore plugin check` on plugins that are installed for the test: good, wrong, crashing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmcore.cli.main import main
from lmcore.contract import API_VERSION, Check, CheckStatus
from lmcore_conformance.contract.snapshot import contract_versions, specified_hooks
from lmcore_conformance.plugin_check import command
from lmcore_conformance.plugin_check.device import DEVICE_CHECKS
from lmcore_conformance.plugin_check.registrations import REGISTRATION_CHECKS
from lmcore_conformance.plugin_check.trial import read_steps

INFO = """
@hookimpl
def lmcore_plugin_info():
    return PluginInfo("guest", ">=1.3,<2", provides=("guest",))
"""
ABSENT = """
@hookimpl
def lmcore_probe(env):
    return Probe("guest", ProbeState.ABSENT, evidence=("no /dev/guest0",))

@hookimpl
def lmcore_create_device(): ...

@hookimpl
def lmcore_precision_policies(device): ...

@hookimpl
def lmcore_recompute_policies(device): ...

@hookimpl
def lmcore_comm_backends(device): ...
"""
KERNEL = """
@hookimpl
def lmcore_op_impls(device):
    assert device.type == "cpu"
    return [OpImpl("rms_norm", "guest", "guest_plugin:rms_norm")]

def rms_norm(x, weight, epsilon):
    return x
"""


def lines(found, status=None):
    """Return the details of the one plugin's checks by name, of this status."""
    (plugin,) = found["plugins"]
    by_name = {}
    for line in plugin["checks"]:
        if status in {None, line["status"]}:
            by_name.setdefault(line["name"], []).append(line["detail"])
    return by_name


def test_the_cpu_plugin_works(check):
    """The reference accelerator has no finding, and each check is made on a CPU."""
    status, found = check("cpu")
    assert status == 0
    assert found["passed"]
    assert found["against"] == API_VERSION
    assert lines(found, "failed") == lines(found, "warning") == lines(found, "skipped") == {}
    names = lines(found, "ok")
    assert {"import", "source", "hooks", "lmcore_create_device", "attention=sdpa"} <= set(names)


def test_a_plugin_whose_device_is_absent_passes_with_what_was_skipped(install, check):
    """Every hook that needs the device is listed as not called, with the probe's evidence."""
    install(INFO + ABSENT + KERNEL)
    status, found = check("lmcore_Guest")
    assert status == 0
    assert lines(found, "failed") == {}
    skipped = lines(found, "skipped")
    assert set(skipped) == {
        "lmcore_create_device",
        "lmcore_precision_policies",
        "lmcore_recompute_policies",
        "lmcore_comm_backends",
        "lmcore_op_impls",
        "hook effects",
    }
    assert skipped.pop("hook effects") == ["no hook of a device was called"]
    for details in skipped.values():
        assert details == ["not called: its device is absent here: no /dev/guest0"]
    assert lines(found, "ok")["lmcore_probe"] == ["`guest` is absent: no /dev/guest0"]


def test_an_extension_is_tried_on_the_cpu(install, check):
    """A plugin without a device has its kernels computed, and its commands and texts looked for."""
    install(
        INFO,
        KERNEL,
        """
        @hookimpl
        def lmcore_add_commands(registry):
            registry.add("guests", "guest_plugin:gone", "List guests.")

        @hookimpl
        def lmcore_add_corpora(registry):
            registry.add("letters", Path(__file__).parents[1] / "letters.txt", "Letters.")

        @hookimpl
        def lmcore_add_tokenizers(registry):
            registry.add("ByteTokenizer", dict)
        """,
    )
    status, found = check("guest")
    assert status == 1
    assert lines(found, "ok")["rms_norm=guest"] == ["`guest_plugin:rms_norm` does 16 of 16 cases"]
    failed = lines(found, "failed")
    registered = {"lmcore_add_commands", "lmcore_add_corpora", "lmcore_add_tokenizers"}
    assert set(failed) == {"rms_norm=guest", *registered}
    assert "regular, float32: it raised RuntimeError" in failed["rms_norm=guest"][0]
    assert "has no attribute 'gone'" in failed["lmcore_add_commands"][0]
    assert "`letters`: there is no file" in failed["lmcore_add_corpora"][0]
    assert "is taken" in failed["lmcore_add_tokenizers"][0]


@pytest.mark.parametrize(
    "name, fault",
    [
        ("data guests", None),
        ("data merge", "the command `data merge`, which is taken"),
        ("train guests", "`train` is taken"),
    ],
)
def test_a_command_in_a_group_of_the_core(install, check, name, fault):
    """The core's groups are open, its commands are not; what is taken in a run is taken here."""
    install(
        INFO,
        f"""
        @hookimpl
        def lmcore_add_commands(registry):
            registry.add("{name}", "builtins:len", "List guests.")
        """,
    )
    status, found = check("guest")
    if fault is None:
        assert lines(found, "ok")["lmcore_add_commands"] == [f"`{name}`"]
    else:
        assert status == 1
        assert fault in lines(found, "failed")["lmcore_add_commands"][0]


def test_a_command_is_called_with_its_arguments(install, check):
    """A function like a console script's, without parameters, cannot be called."""
    install(
        INFO,
        """
        def greet():
            return 0

        @hookimpl
        def lmcore_add_commands(registry):
            registry.add("greet", "guest_plugin:greet", "Greet.")
        """,
    )
    status, found = check("guest")
    assert status == 1
    (line,) = lines(found, "failed")["lmcore_add_commands"]
    assert line.startswith("`greet`: `guest_plugin:greet` has the parameters `()`, and is called")


@pytest.mark.parametrize(
    "source, name, message",
    [
        ("import torch" + INFO, "import", "importing the plugin imports torch: "),
        ("import no_such_module" + INFO, "import", "No module named 'no_such_module'"),
        ("raise SystemExit(4)", "import", "SystemExit: 4"),
        ("ctypes.string_at(0)", "import", "the process was killed by SIGSEGV"),
        ("os._exit(7)", "import", "the process ended with status 7"),
        (
            INFO + ABSENT.replace("    return Probe", "    import torch\n    return Probe"),
            "lmcore_probe",
            "it imports torch: ",
        ),
        (
            INFO + ABSENT.replace("    return Probe", "    1 // 0\n    return Probe"),
            "lmcore_probe",
            "ZeroDivisionError",
        ),
        (
            INFO + ABSENT.replace("ABSENT", "PRESENT"),
            "lmcore_probe",
            "it is present with 0 devices",
        ),
        (
            INFO + ABSENT.replace("    return Probe", "    ctypes.string_at(0)\n    return Probe"),
            "lmcore_probe",
            "the process was killed by SIGSEGV",
        ),
        (
            "from lmcore.contract import own_index\n" + INFO.replace(">=1.3", ">=1"),
            "lmcore_plugin_info",
            "the plugin does not work with that version (source: `lmcore.contract",
        ),
        (INFO.replace('"guest", ">=1.3,<2"', '"guest", ">=2"'), "lmcore_plugin_info", "leaves out"),
        (
            INFO.replace('"guest",)', '"guest",), device_resources={"k9s": "a/b", "slurm": "gpu"}'),
            "lmcore_plugin_info",
            "has `k9s`, and only these kinds of jobs request devices by name: `slurm`, `k8s`; did",
        ),
        (
            INFO.replace('"guest",)', '"guest",), device_resources={"slurm": "g pu"}'),
            "lmcore_plugin_info",
            "not a mapping of kinds of jobs to names without spaces",
        ),
        (
            INFO.replace('"guest",)', '"guest",), device_resources="gpu"'),
            "lmcore_plugin_info",
            "`device_resources` is 'gpu', not a mapping",
        ),
        (INFO.replace(">=1.3,<2", ">=1.3"), "lmcore_plugin_info", "includes version 2.0 of the"),
        (
            INFO.replace('">=1.3,<2"', '">=1.3,<2", torch="<2"'),
            "lmcore_plugin_info",
            "it works with torch <2",
        ),
        (
            "@hookimpl\ndef lmcore_plugin_info():\n    return 'guest'",
            "lmcore_plugin_info",
            "returned `str`, not a `PluginInfo`: 'guest'",
        ),
        (
            INFO.replace('"guest", ">=1.3,<2"', '"cpu", ">=1.3,<2"'),
            "lmcore_plugin_info",
            "two plugins call themselves `cpu`",
        ),
        (INFO + "def lmcore_doctor(): ...", "lmcore_doctor", "not marked"),
        (
            INFO + "@hookimpl\ndef lmcore_doctor():\n    return ['fine']",
            "lmcore_doctor",
            "its list has `str`, not `Check`: 'fine'",
        ),
        (
            INFO
            + "@hookimpl\ndef lmcore_launch_env(rank_info):\n    return [{}][rank_info['rank']]",
            "lmcore_launch_env",
            "for rank 1 of 4 it raised IndexError: list index out of range",
        ),
        (
            INFO + "@hookimpl\ndef lmcore_run_start(run):\n    run['moon']",
            "lmcore_run_start",
            "KeyError: 'moon'",
        ),
    ],
)
def test_a_plugin_that_does_not_work_is_reported_with_its_place(
    request, install, check, source, name, message
):
    """The step at which it fails is named with the cause, and the exit status says so."""
    if "import torch" in source:
        request.getfixturevalue("empty_torch")
    install(source)
    status, found = check("guest")
    assert status == 1
    assert not found["passed"]
    failed = lines(found, "failed")
    assert set(failed) == {name}
    assert message in " ".join(failed[name])


def test_a_device_that_cannot_be_created_is_the_one_failure(install, check):
    """Checks that need the device are skipped with that reason, and the hook is called once."""
    present = ABSENT.replace("ABSENT", "PRESENT, 1")
    install(INFO, present.replace("device(): ...", "device():\n    return 3"), KERNEL)
    status, found = check("guest")
    assert status == 1
    failed = lines(found, "failed")
    assert set(failed) == {"lmcore_create_device"}
    assert "returned `int` from `lmcore_create_device`" in failed["lmcore_create_device"][0]
    reasons = {detail for details in lines(found, "skipped").values() for detail in details}
    assert reasons == {"not called: the device cannot be created"}


def test_the_line_that_imports_torch_is_named(install, check, empty_torch):
    """The line is named also if it is in another module that the plugin imports."""
    install(INFO + ABSENT.replace("    return Probe", "    import torch.nn\n    return Probe"))
    _, found = check("guest")
    (detail,) = lines(found, "failed")["lmcore_probe"]
    assert "guest_plugin.py, line " in detail


def test_a_crash_keeps_what_came_before_and_lists_what_was_not_reached(install, check):
    """The steps after it are skipped, not passed."""
    install(
        INFO,
        KERNEL,
        """
        @hookimpl
        def lmcore_launch_env():
            os.kill(os.getpid(), 9)
        """,
    )
    status, found = check("guest")
    assert status == 1
    assert lines(found, "failed") == {"lmcore_launch_env": ["the process was killed by SIGKILL"]}
    assert lines(found, "ok")["hooks"][0].startswith("3 hooks as version")
    reached = "not reached: the process ended at `lmcore_launch_env`"
    skipped = lines(found, "skipped")
    assert {name for name in skipped if skipped[name] == [reached]} == {
        "lmcore_op_impls",
        "hook effects",
    }


def test_a_hang_is_a_finding(install, check):
    """A part of the time limit without progress ends it, or the limit on a busy machine."""
    install(INFO + "time.sleep(1000)")
    status, found = check("guest", "--timeout", "3")
    assert status == 1
    detail = lines(found, "failed")["import"][0]
    assert "no answer in time" in detail or "no answer within 3 s" in detail


def test_hooks_are_not_called_while_they_are_wrong(install, check):
    """All mistakes are named at once; what depends on them is skipped."""
    install(
        INFO,
        """
        @hookimpl
        def lmcore_doctor(patient): ...

        @hookimpl
        def lmcore_launch_env(probe=None): ...

        @hookimpl
        def lmcore_sing(): ...
        """,
    )
    _, found = check("guest")
    assert set(lines(found, "failed")) == {"lmcore_doctor", "lmcore_launch_env", "lmcore_sing"}
    assert lines(found, "skipped")["lmcore_doctor"] == [
        "not called: its hooks have to be right first"
    ]


def test_a_package_without_the_entry_point_is_a_finding(install, check):
    """It is installed, so that the fix is the entry point, and the group that was meant."""
    install(INFO, group="lmcore.plugin")
    status, found = check("lmcore-guest")
    assert status == 1
    (detail,) = lines(found, "failed")["entry point"]
    assert "no entry point in the group `lmcore.plugins`, but one in `lmcore.plugin`" in detail


def test_a_plugin_is_found_by_the_name_it_gives_itself(install, check):
    """`lmcore plugins` shows that name, not the entry point's."""
    install(INFO, name="visitor")
    status, found = check("guest")
    assert status == 0
    assert found["plugins"][0]["name"] == "visitor"


def test_a_taken_name_is_a_finding(install, check):
    """Two packages that bring one name keep each other out."""
    install(INFO)
    install(INFO, distribution="lmcore-other")
    status, found = check("lmcore-guest")
    assert status == 1
    assert lines(found, "failed")["entry point"] == [
        "the name `guest` is also taken by `lmcore-other`"
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no-such-package"], "no package or plugin `no-such-package` is installed"),
        (["cpuu"], "did you mean `cpu`?"),
        (["cpu", "--against", "0.1"], "no snapshot of version `0.1`"),
        ([], "missing argument `package`"),
    ],
)
def test_a_wrong_request_is_exit_status_2(install, capsys, arguments, message):
    """Nothing was checked, and the message says what there is."""
    assert main(["plugin", "check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_version_lists_those_there_are(capsys):
    """The choices are the snapshots that are shipped."""
    assert main(["plugin", "check", "cpu", "--against", "0.1"]) == 2
    err = capsys.readouterr().err
    assert all(f"`{version}`" in err for version in contract_versions())


def test_text_output_reads_well(install, capsys):
    """Title, a line for each check, the fix below it, the counts, and a verdict."""
    install(INFO + ABSENT + "def lmcore_doctr(): ...")
    assert command.run(["guest"]) == 1
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "plugin guest (lmcore-guest 0.9)"
    assert any(line.split()[:2] == ["failed", "lmcore_doctr"] for line in text)
    assert any(line.strip() == "fix: did you mean `lmcore_doctor`?" for line in text)
    assert (
        text[-1] == f"`guest` does not work with version {API_VERSION} of the contract: 1 finding."
    )


def test_nothing_wrong_and_something_skipped_is_no_promise(install, capsys):
    """The verdict says that not all could be checked."""
    install(INFO + ABSENT)
    assert command.run(["guest"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Nothing is wrong with `guest` in what could be checked here."


def test_an_unknown_command_lists_those_there_are(capsys):
    """The group has help and names its commands."""
    assert main(["plugin", "chekc"]) == 2
    assert "did you mean `check`?" in capsys.readouterr().err
    assert main(["plugin"]) == 0
    assert "check" in capsys.readouterr().out


def test_help_loads_no_torch():
    """The help is there at once."""
    code = (
        "import sys; from lmcore.cli.main import main; main(['plugin', 'check', '--help']);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_every_hook_has_a_check():
    """Each hook of the contract has a check, so that a new hook is not skipped silently."""
    special = {"lmcore_plugin_info", "lmcore_probe"}
    assert {*DEVICE_CHECKS, *REGISTRATION_CHECKS, *special} == set(specified_hooks())


def test_all_unfinished_steps_are_reported():
    """Planned checks are skipped; the check that was running at the end is the failure."""
    good = {"name": "a", "status": "ok", "detail": "", "fix": None}
    values = [{"steps": ["a", "b", "c"]}, {"begin": "a"}, {"check": good}, {"begin": "b"}]
    assert read_steps(values, "it ended") == [
        Check("a", CheckStatus.OK, ""),
        Check("b", CheckStatus.FAILED, "it ended"),
        Check("c", CheckStatus.SKIPPED, "not reached: the process ended at `b`"),
    ]
