"""The commands that use a model: predict, evaluate."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from medcil.cli.data import can_be_interrupted, image_progress, messages, plain_table, printable, screen
from medcil.errors import InvalidInput

if TYPE_CHECKING:
    from medcil.config import ExecutionConfig


Device = Literal["auto", "cpu", "cuda"]
Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model folder, or a file that `medcil export` wrote.")
]
Prior = Annotated[
    str, typer.Option(help="How frequent classes are: uniform, training, or a file (class: share).")
]
Version = Annotated[
    str | None, typer.Option(help="Another version than the current one, as `medcil history` lists it.")
]
On = Annotated[Device, typer.Option(help="Where it is computed.")]


def predict(
    model: Model,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES", help="Files, folders, archives or quoted patterns.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The table, a CSV file.")] = Path(
        "predictions.csv"
    ),
    prior: Prior = "uniform",
    top_k: Annotated[int, typer.Option(min=1, help="Classes to name for each image.")] = 3,
    sensitivity: Annotated[
        list[str] | None,
        typer.Option(help="CLASS=0.95: flag it so that this share of it is caught; repeatedly."),
    ] = None,
    abstain_below: Annotated[
        float | None, typer.Option(min=0, max=1, help="Mark images whose best class is less probable.")
    ] = None,
    version: Version = None,
    device: On = "auto",
) -> None:
    """Classify images: a row for each, with calibrated probabilities; also for one that cannot be read."""
    from medcil.clinic.predict import predict as predict_images

    wanted = _wanted(sensitivity or [])
    with (
        can_be_interrupted("Nothing was written; run the same command again to start over."),
        image_progress("predicting") as watch,
    ):
        found = predict_images(
            model,
            images,
            out=out,
            prior=prior,
            top_k=top_k,
            sensitivity=wanted,
            abstain_below=abstain_below,
            version=version,
            execution=_computed_on(device),
            watch=watch,
        )
    counts = Counter(str(row.predicted) for row in found.rows if row.error is None)
    table = plain_table("predicted", "images")
    table.columns[1].justify = "right"
    for name, n in counts.most_common():
        table.add_row(printable(name), f"{n:,}")
    if counts:
        screen.print(table)
    for note in found.notes:
        messages.print(printable(note), soft_wrap=True)
    prior_and_version = f"version {printable(found.version)}, prior {printable(found.prior.name)}"
    screen.print(
        f"{len(found.rows):,} rows: [bold]{escape(str(out))}[/] ({prior_and_version})", soft_wrap=True
    )


def evaluate(
    model: Model,
    data: Annotated[
        Path, typer.Argument(metavar="DIR", help="Labeled images: folders, a manifest, an archive, a store.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the figures and the page.")] = Path(
        "evaluation"
    ),
    prior: Prior = "uniform",
    grades: Annotated[
        str | None,
        typer.Option(help="All classes from the lowest to the highest grade, with commas: quadratic kappa."),
    ] = None,
    draws: Annotated[int, typer.Option(min=0, help="Draws of the bootstrap, for the intervals.")] = 1000,
    version: Version = None,
    device: On = "auto",
    *,
    all_images: Annotated[
        bool, typer.Option("--all", help="All images, also where the data has a test split.")
    ] = False,
) -> None:
    """Measure a model on labeled images: by class, patient and subgroup, with intervals."""
    from medcil.clinic.evaluate import evaluate as evaluate_model
    from medcil.report import evaluation as words
    from medcil.storage.overwrite_guard import check_output_folder, refuse_within_data

    refuse_within_data(out, data)
    check_output_folder(out, "evaluate")  # the figures are shown first, and written then
    with (
        can_be_interrupted("Nothing was written; run the same command again to start over."),
        image_progress("evaluating") as watch,
    ):
        done = evaluate_model(
            model,
            data,
            prior=prior,
            grades=None if grades is None else [name.strip() for name in grades.split(",")],
            draws=draws,
            all_images=all_images,
            version=version,
            execution=_computed_on(device),
            watch=watch,
        )
    content = done.content
    for header, rows in (
        (words.overall_header(content), words.overall_rows(content)),
        (words.class_header("Images")[:4], [row[:4] for row in words.class_rows(content["by_image"])]),
    ):
        table = plain_table(*(printable(name) for name in header))
        for row in rows:
            table.add_row(*(printable(cell) for cell in row))
        screen.print(table)
        screen.print()
    for note in [*done.notes, *words.unlike_sentences(content), words.interval_sentence(content)]:
        screen.print(printable(note), soft_wrap=True)
    *_, last = done.write(out)
    screen.print(f"Evaluation: [bold]{escape(str(last))}[/]", soft_wrap=True)


def _computed_on(device: Device) -> "ExecutionConfig | None":
    if device == "auto":
        return None
    from medcil.config import ExecutionConfig

    return ExecutionConfig(device=device)


def _wanted(texts: Sequence[str]) -> dict[str, float]:
    shares = dict(_class_and_share(text) for text in texts)
    if len(shares) < len(texts):
        raise InvalidInput("--sensitivity names a class twice: give each one sensitivity.")
    return shares


def _class_and_share(text: str) -> tuple[str, float]:
    name, _, share = text.rpartition("=")
    try:
        if name:
            return name.strip(), float(share)
    except ValueError:
        pass
    raise InvalidInput(f"--sensitivity {text!r} is not of the form CLASS=SHARE, e.g. melanoma=0.95.")
