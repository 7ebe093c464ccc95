"""The commands that use a model: predict, evaluate, explain, export, serve."""

import shlex
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Option

from medcil.cli.console import (
    START_OVER,
    Device,
    Repeated,
    can_be_interrupted,
    execution_on,
    image_progress,
    note,
    out_option,
    printable,
    screen,
    show,
    show_table,
    warn,
)
from medcil.errors import InvalidInput

Model = Annotated[Path, Argument(metavar="MODEL", help="A model folder, or an exported file.")]
Prior = Annotated[str, Option(help="How frequent classes are: uniform, training, or a file (class: share).")]
Version = Annotated[str | None, Option(help="A version of `medcil history`; default: the current one.")]

Share = Annotated[
    float | None, Option(min=0, max=1, help="Mark images whose best class is less probable than this.")
]


def predict(
    model: Model,
    images: Annotated[list[str], Argument(metavar="IMAGES", help="Files, folders, archives or patterns.")],
    out: Annotated[Path, out_option("The table, a CSV file.")] = Path("predictions.csv"),
    prior: Prior = "uniform",
    top_k: Annotated[int, Option(min=1, help="Classes to name for each image.")] = 3,
    sensitivity: Annotated[Repeated, Option(help="CLASS=0.95: flag it to catch this share.")] = None,
    abstain_below: Share = None,
    version: Version = None,
    device: Device = "auto",
) -> None:
    """Classify images: a row for each, with calibrated probabilities; also for one that cannot be read."""
    from medcil.clinic.predict import predict as predict_images

    shares = _sensitivities(sensitivity or ())
    with can_be_interrupted(START_OVER), image_progress("predicting") as watch:
        found = predict_images(
            model,
            images,
            out=out,
            prior=prior,
            top_k=top_k,
            sensitivity=shares,
            abstain_below=abstain_below,
            version=version,
            execution=execution_on(device),
            watch=watch,
        )
    counts = Counter(str(row.predicted) for row in found.rows if row.error is None)
    if counts:
        rows = [(printable(name), f"{n:,}") for name, n in counts.most_common()]
        show_table(("predicted", "images"), rows, right=(1,))
    for sentence in found.notes:
        note(sentence)
    prior_and_version = f"version {printable(found.version)}, prior {printable(found.prior.name)}"
    show(f"{len(found.rows):,} rows: [bold]{escape(str(out))}[/] ({prior_and_version})")


def evaluate(
    model: Model,
    data: Annotated[Path, Argument(metavar="DIR", help="Labeled images, in any layout that train reads.")],
    out: Annotated[Path, out_option("Folder for the figures and the page.")] = Path("evaluation"),
    prior: Prior = "uniform",
    grades: Annotated[str | None, Option(help="Classes in order, with commas: quadratic kappa.")] = None,
    draws: Annotated[int, Option(min=0, help="Draws of the bootstrap, for the intervals.")] = 1000,
    version: Version = None,
    device: Device = "auto",
    *,
    all_images: Annotated[bool, Option("--all", help="All images, also those of a train split.")] = False,
) -> None:
    """Measure a model on labeled images: by class, patient and subgroup, with intervals."""
    from medcil.clinic.evaluate import evaluate as evaluate_model
    from medcil.report import evaluation as words
    from medcil.storage.overwrite_guard import check_output_folder, refuse_within_data

    refuse_within_data(out, data)
    check_output_folder(out, "evaluate")  # the figures are shown first, and written then
    with can_be_interrupted(START_OVER), image_progress("evaluating") as watch:
        done = evaluate_model(
            model,
            data,
            prior=prior,
            grades=None if grades is None else [name.strip() for name in grades.split(",")],
            draws=draws,
            all_images=all_images,
            version=version,
            execution=execution_on(device),
            watch=watch,
        )
    content = done.content
    classes = [row[:4] for row in words.class_table(content["by_image"], "Images")]
    for header, *rows in (words.overall_table(content), classes):
        show_table([*map(printable, header)], [[*map(printable, row)] for row in rows])
        screen.print()
    for sentence in [*done.notes, *words.unlike_sentences(content), words.interval_sentence(content)]:
        show(printable(sentence))
    *_, last = done.write(out)
    show(f"Evaluation: [bold]{escape(str(last))}[/]")


def _sensitivities(texts: Sequence[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in texts:
        name, _, share = text.rpartition("=")
        try:
            value = float(share) if name else None
        except ValueError:
            value = None
        if value is None or name.strip() in shares:
            raise InvalidInput(
                f"--sensitivity {text!r}: write CLASS=SHARE once for each class, as in melanoma=0.95.",
                code="option.sensitivity.invalid",
            )
        shares[name.strip()] = value
    return shares


class Format(StrEnum):
    onnx = "onnx"


def export(
    model: Model,
    file_format: Annotated[Format, Option("--format", help="The kind of file.")] = Format.onnx,
    out: Annotated[Path | None, out_option("The file; default: MODEL.onnx in this folder.")] = None,
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
    image: Annotated[Path, Argument(metavar="IMAGE", help="The image to explain.")],
    out: Annotated[Path, out_option("Folder for the figure and the page.")] = Path("explanation"),
    version: Version = None,
    device: Device = "auto",
) -> None:
    """Show where in an image the answer comes from, and the exemplars it is nearest to."""
    from medcil.clinic.explain import explain as explain_image

    with can_be_interrupted("Run the same command again to start over."):
        explanation = explain_image(model, image, out, version=version, execution=execution_on(device))
    first, second = explanation.classes
    show(
        f"[bold]{escape(first.name)}[/] {first.probability:.1%}, then {escape(second.name)} "
        f"{second.probability:.1%} (uniform prior, version {escape(explanation.version)})"
    )
    if explanation.is_unlike:
        screen.print("[yellow]This image is unlike anything the model knows.[/]")
    show(f"Page: [bold]{escape(str(out / 'index.html'))}[/]")


def serve(
    model: Annotated[Path, Argument(metavar="MODEL", help="A model folder, written by `medcil train`.")],
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    host: Annotated[str, Option(help="Address to listen on; default: this machine only.")] = "127.0.0.1",
    prior: Annotated[Path | None, Option(help="A file (class: share), beside the other priors.")] = None,
    name: Annotated[Repeated, Option(help="Another host name by which it is opened, repeatedly.")] = None,
    device: Device = "auto",
) -> None:
    """Open a local page for a model: drop images, see its answers and why, its versions and their cost."""
    from medcil.serving import is_loopback
    from medcil.serving import serve as serve_model

    def opened(address: str) -> None:
        if not is_loopback(host):
            warn(
                f"Everyone who can reach {host} can use this model and see its exemplars: there is no "
                "password and no encryption."
            )
        show(f"Page: [bold]{escape(address)}[/] (Ctrl-C ends it)")

    serve_model(model, port=port, host=host, prior=prior, name=name or (), device=device, watch=opened)
