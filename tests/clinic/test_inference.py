"""Answers of a model, whatever it is made of."""

from dataclasses import replace

import numpy as np

from medcil.clinic.calibration import uncalibrated
from medcil.clinic.inference import OpenModel
from medcil.clinic.predict import choose_prior, predictions


def test_scores_that_are_no_numbers_are_an_error_of_their_image():
    """A network that diverged in training would otherwise always say the first class."""

    def answer(pixels):
        scores = np.zeros((len(pixels), 2))
        scores[1, 0], scores[2, 1] = np.nan, np.inf
        return scores, np.ones(len(pixels))

    model = OpenModel("v1", ("a", "b"), 4, uncalibrated(1.0, [0.0, 0.0]), (), answer)
    prior = choose_prior(model, "uniform")
    rows = predictions(model, "1234", lambda i: np.zeros((3, 4, 4), dtype=np.uint8), prior)
    assert [row.error is None for row in rows] == [True, False, False, True]
    sound = replace(model, answer=lambda pixels: (np.zeros((len(pixels), 2)), np.ones(len(pixels))))
    rows = predictions(sound, "1234", lambda i: np.zeros((3, 4, 4), dtype=np.uint8), prior)
    assert [row.error for row in rows] == [None] * 4
