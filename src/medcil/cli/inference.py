"""The commands that use a model: predict, evaluate, explain, export, serve."""

import shlex
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from medcil.cli.console import (
    START_OVER,
    can_be_interrupted,
    image_progress,
    messages,
    note,
    plain_table,
    printable,
    screen,
    show,
)
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
        can_be_interrupted(START_OVER),
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
    for sentence in found.notes:
        note(sentence)
    prior_and_version = f"version {printable(found.version)}, prior {printable(found.prior.name)}"
    show(f"{len(found.rows):,} rows: [bold]{escape(str(out))}[/] ({prior_and_version})")


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
        can_be_interrupted(START_OVER),
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
    classes = [row[:4] for row in words.class_table(content["by_image"], "Images")]
    for header, *rows in (words.overall_table(content), classes):
        table = plain_table(*(printable(name) for name in header))
        for row in rows:
            table.add_row(*(printable(cell) for cell in row))
        screen.print(table)
        screen.print()
    for sentence in [*done.notes, *words.unlike_sentences(content), words.interval_sentence(content)]:
        show(printable(sentence))
    *_, last = done.write(out)
    show(f"Evaluation: [bold]{escape(str(last))}[/]")


def _computed_on(device: Device) -> "ExecutionConfig | None":
    if device == "auto":
        return None
    from medcil.config import ExecutionConfig

    return ExecutionConfig(device=device)


def _wanted(texts: Sequence[str]) -> dict[str, float]:
    shares = dict(_class_and_share(text) for text in texts)
    if len(shares) < len(texts):
        raise InvalidInput(
            "--sensitivity names a class twice: give each one sensitivity.",
            code="option.sensitivity.duplicate",
        )
    return shares


def _class_and_share(text: str) -> tuple[str, float]:
    name, _, share = text.rpartition("=")
    try:
        if name:
            return name.strip(), float(share)
    except ValueError:
        pass
    raise InvalidInput(
        f"--sensitivity {text!r} is not of the form CLASS=SHARE, e.g. melanoma=0.95.",
        code="option.sensitivity.invalid",
    )


class Format(StrEnum):
    onnx = "onnx"


def export(
    model: Model,
    file_format: Annotated[Format, typer.Option("--format", help="The kind of file.")] = Format.onnx,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; default: the model's name with .onnx, here.")
    ] = None,
    version: Version = None,
) -> None:
    """Write a model as one file that predicts without torch, once it agrees with the network."""
    from medcil.clinic.export import export as export_model

    path = out or Path(f"{model.resolve().name}.{file_format.value}")
    with can_be_interrupted("No file was written."):
        exported = export_model(model, path, version=version)
    show(escape(exported.sentence()))
    name = escape(shlex.quote(str(path)))
    show(f"Predict with it: [bold]medcil predict {name} IMAGES -o predictions.csv[/]")


def explain(
    model: Model,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The image to explain.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the figure, its numbers and the page.")
    ] = Path("explanation"),
    version: Version = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where it is computed.")] = "auto",
) -> None:
    """Show where in an image the answer comes from, and the exemplars it is nearest to."""
    from medcil.clinic.explain import explain as explain_image
    from medcil.config import ExecutionConfig

    with can_be_interrupted("Run the same command again to start over."):
        explanation = explain_image(
            model, image, out, version=version, execution=ExecutionConfig(device=device)
        )
    first, second = explanation.predicted, explanation.runner_up
    show(
        f"[bold]{escape(first.name)}[/] {first.probability:.1%}, then {escape(second.name)} "
        f"{second.probability:.1%} (uniform prior, version {escape(explanation.version)})"
    )
    if explanation.is_unlike:
        screen.print("[yellow]This image is unlike anything the model knows.[/]")
    show(f"Page: [bold]{escape(str(out / 'index.html'))}[/]")


def serve(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, written by `medcil train`.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")
    ] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default only this machine can reach it.")
    ] = "127.0.0.1",
    prior: Annotated[
        Path | None, typer.Option(help="A file (class: share), to choose beside uniform and training.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that others open it by, besides addresses and this machine's own; repeatedly."
        ),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where it is computed.")] = "auto",
) -> None:
    """Open a local page for a model: drop images, see its answers and why, its versions and their cost."""
    from medcil.serving.server import is_loopback
    from medcil.serving.server import serve as serve_model

    def opened(address: str) -> None:
        if not is_loopback(host):
            messages.print(
                f"[yellow]Everyone who can reach {escape(host)} can use this model and see its exemplars: "
                "there is no password and no encryption.[/]",
                soft_wrap=True,
            )
        show(f"Page: [bold]{escape(address)}[/] (Ctrl-C ends it)")

    serve_model(model, port=port, host=host, prior=prior, name=name or (), device=device, watch=opened)
