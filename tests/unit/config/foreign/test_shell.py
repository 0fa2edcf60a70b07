"""Shell scripts read without being run, compared with what bash does with them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.foreign.shell import read_shell
from lmcore.config.foreign.shell_values import shell_line

SCRIPTS = {
    "quotes": """python pretrain "a b" 'c $X' d\\ e "f\\"g" h"i"'j' "" """,
    "variables": """
A=1; B="x $A y"
export C=${A}2 D='$A'
python pretrain $A "$B" $B ${C} "$D" ${A}b pre$A""",
    "defaults": """
A= ; N=4
python pretrain ${X:-one} "${X-two words}" ${A:-three} ${A-four} ${N:+five} ${X:+six} ${Y:=7} $Y""",
    "quoted defaults": """
N=4
D="a b"
export IN=${IN:-"/data/in"}
python pretrain ${X:-"one"} "${Y:-"two $N"}" ${Z:-'$N'} "${Z:-'$N'}" ${W:-"a"/b$N"c"} ${Q:="q"} \
    $Q $IN/x ${D##"a "} ${D:+"set"} """,
    "lines": """
ARGS=" \\
    --num-layers 2 \\
    --lr 1e-4 \\
"
# ARGS="$ARGS --left-out"
python pretrain \\
    $ARGS \\
    --seed 1  # the last one
""",
    "arrays": """
ARGS=(--lr 1e-4 "two words"  # a comment
    --seed 1)
ARGS+=(--more)
python pretrain "${ARGS[@]}" ${ARGS[@]} "${ARGS[1]}" ${#ARGS[@]} "x${ARGS[0]}y" """,
    "added": """
A=a; A+=b; A+=" c"
python pretrain $A "$A" """,
    "arithmetic": """
N=4; T=2
python pretrain $((N * 8 / T)) $(( (N + 1) % 3 )) $((-N)) $(($N+${T}))""",
    "patterns": """
P=/data/my.corpus.bin
python pretrain ${P%.bin} ${P##*/} ${P#*/} ${P%%.*}""",
    "inner": """
CMD="pretrain --lr 1"
LAUNCHER="python"
export CMD LAUNCHER
bash -c '$LAUNCHER $CMD --more "a b"'""",
    "eval": """
CMD='python pretrain "a b" c'
eval $CMD""",
    "branches": """
if [ 1 = 1 ]; then
    LR=1
fi
{ LR2=2; }
python pretrain $LR $LR2 2>&1 | cat""",
    "home": """
A=~/a; B="~/b"; C=~
python pretrain ~/c $A $B $C ~ "~" x~/y --in=~/z $HOME/d ~"/e" """,
    "redirected": "python pretrain a > /dev/stdout 2> /dev/null",
    "blanks": """
A="  a   b "
python pretrain x${A}y "x${A}y" $A""",
}


def in_bash(script: str) -> list[list[str]]:
    """Return the arguments of each call of `python` when bash runs a script."""
    stub = 'python() { printf "%s\\1" "$@"; printf "\\2"; }; export -f python\n'
    done = subprocess.run(
        ["bash", "-c", stub + script], capture_output=True, text=True, timeout=20, check=True
    )
    return [one.split("\1")[:-1] for one in done.stdout.split("\2")[:-1]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    """Each command that is read has the words that bash gives it."""
    read = read_shell(SCRIPTS[name], {})
    commands = [one[1:] for one in read.commands if one[0] == "python"]
    assert commands == in_bash(SCRIPTS[name])
    assert not read.unknown


def test_a_here_document_is_a_file() -> None:
    """Its variables are replaced, unless its mark is quoted; it is kept by the path written."""
    script = """
N=2; FILE=./ds.json
cat <<EOT > $FILE
{"a": $N, "b": "$(date)"}
EOT
cat > plain.txt <<'EOT'
$N
EOT
python pretrain --config $FILE
"""
    read = read_shell(script, {})
    assert read.files == {"./ds.json": '{"a": 2, "b": "$(date)"}\n', "plain.txt": "$N\n"}
    assert read.commands == [["python", "pretrain", "--config", "./ds.json"]]
    assert read.unknown == ["$(date)"]


def test_what_only_a_run_knows_is_noted() -> None:
    """Output of commands and missing variables stay as written, as one word each."""
    read = read_shell(
        "A=$(hostname -f)\nsrun python pretrain --host $A --rank ${RANK} --args `date +%s` $@", {}
    )
    words = ["--host", "$(hostname -f)", "--rank", "${RANK}", "--args", "`date +%s`"]
    assert read.commands == [["srun", "python", "pretrain", *words]]
    assert read.unknown == ["$(hostname -f)", "${RANK}", "`date +%s`", "$@"]


def test_a_branch_that_changes_a_variable_is_noted() -> None:
    """A value that an `if` replaces is used, with a note; a first value needs none."""
    script = """
A=""; B=1
if [ -d /opt/x ]; then
    A="--x"
    C=2
fi
B=3
python pretrain $A $B $C"""
    read = read_shell(script, {})
    assert read.commands[-1] == ["python", "pretrain", "--x", "3", "2"]
    assert [note.partition(" is set in an `if`")[0] for note in read.notes] == ["`A`"]
    read = read_shell(script, {"A": ""})
    assert read.commands[-1] == ["python", "pretrain", "3", "2"]
    assert not read.notes


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")
def test_a_line_leaves_to_the_shell_what_is_not_known() -> None:
    """Bash gives a line the words with the values of a run, and keeps every other sign."""
    words = ["a b", "$X", "--n=$X/$(echo 'c d')", "it's", '$Y "`$X"', "`echo e`", "\\$X"]
    unknown = ["$X", "$(echo 'c d')", "`echo e`"]
    line = shell_line(["python", *words], unknown)
    expected = ["a b", "x y", "--n=x y/c d", "it's", '$Y "`x y"', "e", "\\x y"]
    assert in_bash(f"X='x y'; Y=no\n{line}") == [expected]


def test_a_place_to_fill_in_is_noted() -> None:
    """Examples have `<your path>` where a value is to be written."""
    read = read_shell("V=<path to file>/vocab.json\npython pretrain --vocab-file $V", {})
    assert read.commands == [["python", "pretrain", "--vocab-file", "<path to file>/vocab.json"]]
    assert read.unknown == ["<path to file>"]


def test_a_place_to_fill_in_may_have_marks() -> None:
    """A page's own marks inside such a place are part of it."""
    read = read_shell("A=<same as in <a href=#x>training</a> above>\npython pretrain $A", {})
    assert read.unknown == ["<same as in <a href=#x>training</a> above>"]
    assert read.commands == [["python", "pretrain", "<same as in <a href=#x>training</a> above>"]]


def test_a_line_without_its_backslash_is_noted() -> None:
    """BigScience's page has `--load $X` without a backslash before `--save`."""
    read = read_shell("python merge.py \\\n--load a\n--save b\n", {})
    assert read.commands == [["python", "merge.py", "--load", "a"]]
    assert [note.partition(" is ")[0] for note in read.notes] == ["`--save b`"]


def test_the_same_unknown_value_is_noted_once() -> None:
    """A value that was expanded before is the same one."""
    read = read_shell('A=$(hostname -f)\nC="pretrain --host $A"\nbash -c "python $C"', {})
    assert read.unknown == ["$(hostname -f)"]


def test_a_command_of_a_document_is_read() -> None:
    """The marks around code in Markdown are left out."""
    read = read_shell("```bash\npython pretrain \\\n  --lr 1\n```\n", {})
    assert read.commands == [["python", "pretrain", "--lr", "1"]]


def test_given_variables_count() -> None:
    """A value that is given replaces what the script sets, and what it lacks."""
    read = read_shell("A=1\nA=2\npython $A $B", {"A": "mine", "B": "too"})
    assert read.commands == [["python", "mine", "too"]]


def test_loops_and_files_that_are_read_are_noted() -> None:
    """A loop has no value, and a file that is read may set anything."""
    read = read_shell("source env.sh\nfor LR in 1 2; do python $LR; done", {})
    assert read.commands == [["python", "$LR"]]
    assert [note.partition(" ")[0] for note in read.notes] == ["`env.sh`", "the"]


@pytest.mark.parametrize(
    "script,what",
    [
        ("a\nb 'c", "line 2"),
        ('a "b $(c', "does not end"),
        ("A=(1 2", "array"),
        ("cat <<EOT > f\ntext\n", "here-document `EOT`"),
    ],
)
def test_what_does_not_end_is_an_error(script: str, what: str) -> None:
    """The message names the line, or what was begun."""
    with pytest.raises(ConfigError, match=what):
        read_shell(script, {})


def test_nesting_is_limited() -> None:
    """A script that starts itself again ends."""
    with pytest.raises(ConfigError, match="nests"):
        read_shell("A='eval $A'\neval $A", {})


def test_many_commands_are_refused() -> None:
    """A file that is no launch script ends early."""
    with pytest.raises(ConfigError, match="10,000"):
        read_shell("a\n" * 10_001, {})
