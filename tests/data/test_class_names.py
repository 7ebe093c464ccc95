"""Which names of classes are asked about, and what the answers mean."""

import itertools

import pytest

from medcil.data.class_names import are_similar, names_in_model

from ..errors.raises import raises

KNOWN = ("melanoma", "BCC", "nevus", "basal cell carcinoma", "grade 1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Melanomas", "melanoma"),
        ("melanmoa", "melanoma"),
        ("melnoma", "melanoma"),
        ("melamoma", "melanoma"),
        ("emelanoma", "melanoma"),
        ("nevi", "nevus"),
        ("warts", "WART"),
        ("psoriases", "psoriasis"),
        ("allergies", "allergy"),
        ("ВСС", "BCC"),  # Cyrillic
        ("ΒСC", "BCC"),  # Greek, Cyrillic, Latin
        ("ＢＣＣ", "BCC"),  # wide
        ("B\u200bCC", "BCC"),  # a space of no width
        ("Nävus", "navus"),
        ("basal_cell-carcinoma", "basal cell carcinoma"),
        ("BasalCellCarcinomas", "basal cell carcinoma"),
        ("skin lesions, benign", "skin lesion benign"),
        ("grade_1", "grade 1"),
    ],
)
def test_similar_names(one, other):
    assert are_similar(one, other)
    assert are_similar(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *itertools.combinations(["MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"], 2),
        *itertools.combinations(["grade 1", "grade 2", "grade 11", "grade1b"], 2),
        *itertools.combinations(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"], 2),
        ("ER+", "ER-"),
        ("type a", "type b"),
        ("benign lesion", "malign lesion"),
        ("melanoma", "melanoma in situ"),
    ],
)
def test_names_of_different_classes(one, other):
    assert not are_similar(one, other)
    assert not are_similar(other, one)


def test_case_and_encoding_alone_make_no_other_class():
    names = ["bcc", "Melanoma", "wart"]
    assert names_in_model(names, KNOWN) == {"bcc": "BCC", "Melanoma": "melanoma", "wart": "wart"}
    assert names_in_model(["ne\u0301vus"], ["névus"]) == {"ne\u0301vus": "névus"}


def test_an_answer_settles_what_a_similar_name_means():
    with raises("model.class.similar", "'Melanomas' is nearly the model's 'melanoma'", "--as-new Melanomas"):
        names_in_model(["Melanomas"], KNOWN)
    assert names_in_model(["Melanomas"], KNOWN, as_new=["melanomas"]) == {"Melanomas": "Melanomas"}
    meant = names_in_model(["Melanomas", "wart"], KNOWN, same_as={"MELANOMAS": "Melanoma", "wart": "nevus"})
    assert meant == {"Melanomas": "melanoma", "wart": "nevus"}


def test_letters_of_another_alphabet_are_spelled_out():
    with raises("model.class.similar", r"('\u0412\u0421\u0421' and 'BCC')", "--same-as 'ВСС=BCC'"):
        names_in_model(["ВСС"], KNOWN)
    with raises(
        "model.class.similar", "--same-as 'basal-cell carcinoma=basal cell carcinoma'", "--as-new Melanomas"
    ):
        names_in_model(["Melanomas", "basal-cell carcinoma"], KNOWN)


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ({"as_new": ["Melanoms"]}, "option.class.unknown"),
        ({"same_as": {"Melanoms": "melanoma"}}, "option.class.unknown"),
        ({"same_as": {"Melanomas": "melanomata"}}, "option.class.unknown"),
        ({"as_new": ["NEVUS"]}, "option.class.settled"),
        ({"same_as": {"nevus": "melanoma"}}, "option.class.settled"),
        ({"as_new": ["melanomas"], "same_as": {"Melanomas": "melanoma"}}, "option.class.settled"),
    ],
)
def test_answers_that_nobody_asked_for_are_refused(answers, code):
    with raises(code):
        names_in_model(["Melanomas", "nevus"], KNOWN, **answers)
