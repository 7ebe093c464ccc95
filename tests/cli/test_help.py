"""What `--help` says, in one voice, and what a mistyped word leads to."""

from importlib import metadata

import pytest
import typer

from medcil.cli.main import app, main

COMMANDS = typer.main.get_command(app).commands
COMMANDS |= {f"weights {name}": command for name, command in COMMANDS["weights"].commands.items()}


def said(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    return int(ended.value.code or 0), " ".join((told.out + told.err).split())


@pytest.mark.parametrize("name", COMMANDS)
def test_everything_is_explained_by_a_sentence(name):
    command = COMMANDS[name]
    assert command.help.strip().endswith(".")
    for parameter in command.params:
        assert (parameter.help or "").endswith("."), parameter.name


def test_the_same_option_has_the_same_name_and_letter():
    options = [each for command in COMMANDS.values() for each in command.params if each.name == "out"]
    assert len(options) > 10
    assert {tuple(sorted(each.opts)) for each in options} == {("--out", "-o")}
    letters = {opt for c in COMMANDS.values() for each in c.params for opt in each.opts if len(opt) == 2}
    assert letters == {"-o"}


def test_the_version(capsys):
    assert said(capsys, "--version") == (0, f"medcil {metadata.version('medcil')}")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("trian", "data"), "Did you mean 'train'?"),
        (("predict", "model", "x.png", "--priors", "uniform"), "--prior"),
        (("train", "data"), "Missing option '--out'"),
        (("update", "model"), "Missing argument 'NEW_DIR'"),
        (("export", "model", "--format", "onx"), "'onx' is not one of 'onnx'"),
    ],
)
def test_a_mistyped_word_is_met_with_the_right_one(arguments, hint, capsys):
    code, told = said(capsys, *arguments)
    assert code == 2
    assert hint in told


@pytest.mark.parametrize(
    ("arguments", "reason", "shown_by"),
    [
        (("predict",), "Missing argument 'MODEL'.", "medcil predict"),
        (("train",), "Missing argument 'DIR'.", "medcil train"),
        (("train", "data", "--nosuch"), "No such option: --nosuch", "medcil train"),
        (("bench", "--at-once", "x"), "Invalid value for '--at-once'", "medcil bench"),
        (("prepare", "data", "-o", "store", "--side", "0"), "Invalid value for '--side'", "medcil prepare"),
        (("methods", "one", "two"), "unexpected extra argument", "medcil methods"),
        (("run", "recipe.yaml", "--set"), "Option '--set' requires an argument", "medcil run"),
        (("nosuch", "[/red]"), "No such command 'nosuch'.", "medcil"),
        (("--nosuch",), "No such option: --nosuch", "medcil"),
    ],
)
def test_the_first_line_says_what_is_wrong_and_what_to_do(arguments, reason, shown_by, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    assert reason in line
    assert line.endswith(f". See `{shown_by} --help`.")


def test_no_word_at_all_shows_the_commands(capsys):
    code, told = said(capsys)
    assert code == 2
    assert told.startswith("Usage: medcil [OPTIONS] COMMAND")
