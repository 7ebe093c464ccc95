"""Answers of a model, whatever it is made of."""

from dataclasses import replace

import numpy as np

from medcil.clinic.calibration import uncalibrated
from medcil.clinic.inference import OpenModel, answers


def test_scores_that_are_no_numbers_are_an_error_of_their_image():
    """A network that diverged in training would otherwise always say the first class."""

    def answer(pixels):
        scores = np.zeros((len(pixels), 2))
        scores[1, 0], scores[2, 1] = np.nan, np.inf
        return scores, np.ones(len(pixels))

    model = OpenModel("v1", ("a", "b"), 4, uncalibrated(1.0, [0.0, 0.0]), (), answer, None)
    (batch,) = answers(model, 4, lambda i: np.zeros((3, 4, 4), dtype=np.uint8))
    assert [error is None for error in batch.errors] == [True, False, False, True]
    sound = replace(model, answer=lambda pixels: (np.zeros((len(pixels), 2)), np.ones(len(pixels))))
    (batch,) = answers(sound, 4, lambda i: np.zeros((3, 4, 4), dtype=np.uint8))
    assert batch.errors == (None,) * 4
