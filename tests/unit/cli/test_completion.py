"""``hearth completion`` prints a script that a shell completes verbs and flags by."""

import subprocess

import pytest

from hearth.cli.completion import completion

ASK = """
source /dev/fd/3 3< <(cat)
ask() { COMPREPLY=(); COMP_WORDS=(hearth "$@"); COMP_CWORD=$#; COMP_LINE="hearth $*"
        COMP_POINT=${#COMP_LINE}
        _tyro_hearth hearth "${@: -1}" "${COMP_WORDS[$#-1]}"; echo "${COMPREPLY[@]}"; }
ask doc; ask serve --da; ask train --dataset; ask serve --placement in
"""


@pytest.mark.slow
def test_bash_completes_verbs_flags_and_choices(capsys):
    with pytest.raises(SystemExit) as ended:
        completion(["bash"])
    assert ended.value.code in (0, None)

    script = capsys.readouterr().out
    done = subprocess.run(
        ["bash", "-c", ASK], input=script, capture_output=True, text=True, check=True
    )

    verb, flags, dataset, choice = done.stdout.splitlines()
    assert verb == "doctor"
    assert flags.split() == ["--data-dir", "--database-url"]
    assert "--dataset" in dataset.split()
    assert choice == "inline"
