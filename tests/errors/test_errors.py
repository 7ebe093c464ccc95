"""What an error carries: a code that survives pickling, and one of its class where it has none of its own."""

import pickle

import pytest

from medcil.errors import DamagedFile, InvalidInput, MedcilError

from .raises import raises


def test_an_error_has_its_own_code_or_that_of_its_class() -> None:
    assert InvalidInput("No such folder.", code="data.root.missing").code == "data.root.missing"
    assert InvalidInput("No such folder.").code == "input.invalid"
    assert DamagedFile("x").code == "file.damaged"


def test_a_code_reaches_the_process_that_started_this_one() -> None:
    error = pickle.loads(pickle.dumps(InvalidInput("No such folder.", code="data.root.missing")))
    assert (str(error), error.code) == ("No such folder.", "data.root.missing")


def test_raises_compares_the_code_and_the_words() -> None:
    def fail() -> None:
        raise MedcilError("No such folder: x.", code="data.root.missing")

    with raises("data.root.missing", "folder"):
        fail()
    with pytest.raises(AssertionError), raises("data.root.invalid"):
        fail()
    with pytest.raises(AssertionError), raises("data.root.missing", "file"):
        fail()
