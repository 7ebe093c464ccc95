"""The commands about a model of your own images: train, update, predict, evaluate, explain and others."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.markup import escape
from rich.text import Text
from typer import Argument, Option

from medcil.cli.console import (
    CONTINUE,
    START_OVER,
    Device,
    Repeated,
    Settings,
    TrainingBars,
    Weights,
    can_be_interrupted,
    duration,
    execution_on,
    image_progress,
    note,
    out_option,
    printable,
    show,
    show_remarks,
    show_table,
    training_progress,
    warn,
)
from medcil.errors import InvalidInput, NotPromoted, NotSubtracted

if TYPE_CHECKING:
    from medcil.clinic.predict import Predictions
    from medcil.clinic.settings import Choice, Plan
    from medcil.clinic.train import Lesson, Trained, Watches

UNCHANGED = f"{CONTINUE} No version was changed."
SHOWN = 10  # flipped images on the screen
VISIBLE = 0.2
"""A loss of recall that should be seen; a class whose sealed images cannot show it is named."""
FEW = 5  # classes with too few sealed images on the screen
LISTED = 20  # predictions on the screen; of more, counts
Data = Annotated[Path, Argument(metavar="DIR", help="A folder per class, or a manifest, archive or store.")]
Model = Annotated[Path, Argument(metavar="MODEL", help="A model folder, written by `medcil train`.")]
Eval = Annotated[Path | None, Option("--eval", help="Images to measure the model on, not to train on.")]
Epochs = Annotated[int | None, Option(min=1, help="Training epochs. By default, by the number of images.")]
Holdout = Annotated[
    int | None,
    Option(min=0, help="Images of each class to measure on, at most. By default the model's, or 200."),
]
Method = Annotated[
    str | None, Option(help="A name from `medcil methods`. By default the model's, or `balanced`.")
]
Exemplars = Annotated[
    int | None,
    Option(
        min=0, help="Images of each class to keep for updates. By default the model's, or 20 (`analytic`: 0)."
    ),
]
Conflicts = Annotated[
    str, Option(metavar="refuse|skip|CLASS", help="What to do if one picture is in several classes.")
]
KeepEmbeddings = Annotated[
    bool,
    Option("--keep-embeddings", help="Keep features of each image (`analytic`), to erase or relabel it."),
]
DryRun = Annotated[bool, Option("--dry-run", help="Say what would happen, and write nothing.")]
Points = Annotated[float | None, Option(min=0, max=100, help="Points of mean recall that may be lost.")]

ModelOrFile = Annotated[Path, Argument(metavar="MODEL", help="A model folder, or a file of `medcil export`.")]
Prior = Annotated[str, Option(help="Class frequencies: uniform, training, or a file (class: share).")]
Version = Annotated[str | None, Option(help="A version from `medcil history`. By default, the current one.")]
Share = Annotated[
    float | None, Option(min=0, max=1, help="Mark images whose best class is less probable than this.")
]


def train(
    data: Data,
    out: Annotated[Path, out_option("The new model folder. An unfinished one is continued.")],
    start: Annotated[
        Path | None,
        Option(
            "--from",
            metavar="MODEL",
            help="Start from the frozen network of this `analytic` model; no training.",
        ),
    ] = None,
    eval_: Eval = None,
    holdout: Holdout = None,
    method: Method = None,
    epochs: Epochs = None,
    exemplars: Exemplars = None,
    side: Annotated[int | None, Option(min=8, help="Pixels on a side. By default, from the images.")] = None,
    backbone: Annotated[str | None, Option(help="A timm network. By default, chosen from the side.")] = None,
    weights: Weights = None,
    settings: Settings = None,
    conflicts: Conflicts = "refuse",
    *,
    keep_embeddings: KeepEmbeddings = False,
    dry_run: DryRun = False,
) -> None:
    """Check images, choose settings, train on all classes, and write a model folder."""
    from medcil.clinic.measure import summary
    from medcil.clinic.settings import Plan
    from medcil.clinic.train import train as train_model

    with can_be_interrupted(UNCHANGED), _watches("training") as watches:
        done = train_model(
            data,
            out,
            start=start,
            eval=eval_,
            holdout=holdout,
            method=method,
            epochs=epochs,
            exemplars=exemplars,
            side=side,
            backbone=backbone,
            weights=weights,
            settings=settings or (),
            conflicts=conflicts,
            keep_embeddings=keep_embeddings,
            dry_run=dry_run,
            watches=watches,
        )
    if isinstance(done, Plan):
        _show_plan(done)
        return
    _show_classes(done.metrics)
    show(summary(done.metrics))
    _show_place(out, done.version)


def update(
    model: Model,
    new_data: Annotated[Path, Argument(metavar="NEW_DIR", help="Images of new or known classes.")],
    max_forgetting: Points = None,
    eval_: Eval = None,
    holdout: Holdout = None,
    method: Method = None,
    epochs: Epochs = None,
    exemplars: Exemplars = None,
    settings: Settings = None,
    conflicts: Conflicts = "refuse",
    as_new: Annotated[
        Repeated,
        Option(metavar="NAME", help="A class that is new, though its name is like a known one."),
    ] = None,
    same_as: Annotated[
        Repeated, Option(metavar="NAME=KNOWN", help="A class that the model knows by another name.")
    ] = None,
    *,
    keep_embeddings: KeepEmbeddings = False,
    dry_run: DryRun = False,
) -> None:
    """Add images of new or known classes, as a new version, and report what it forgot of the old classes."""
    from medcil.clinic.settings import Plan
    from medcil.clinic.update import update as update_model

    meant = _same_as(same_as or ())
    with can_be_interrupted(UNCHANGED), _watches("update") as watches:
        done = update_model(
            model,
            new_data,
            max_forgetting=max_forgetting,
            dry_run=dry_run,
            eval=eval_,
            holdout=holdout,
            method=method,
            epochs=epochs,
            exemplars=exemplars,
            settings=settings or (),
            conflicts=conflicts,
            keep_embeddings=keep_embeddings,
            as_new=as_new or (),
            same_as=meant,
            watches=watches,
        )
    if isinstance(done, Plan):
        _show_plan(done)
        return
    _show_forgetting(done)
    _show_place(model, done.version)
    if not done.promoted:
        gate = done.forgetting["gate"]
        raise NotPromoted(
            f"{done.version} is not promoted: the old classes lost {gate['loss_in_points']:.1f} points of "
            f"mean recall, more than {gate['max_forgetting']:g}. "
            f"The model still uses {done.provenance['parent']}.\n"
            f"`medcil rollback {model} {done.version}` makes it current all the same."
        )


def _same_as(texts: Sequence[str]) -> dict[str, str]:
    meant: dict[str, str] = {}
    for text in texts:
        name, _, known = text.rpartition("=")
        if not name or not known or name in meant:
            raise InvalidInput(
                f"--same-as {text!r}: write NAME=KNOWN once for each name, as in Melanomas=melanoma.",
                code="option.same_as.invalid",
            )
        meant[name] = known
    return meant


def rebalance(
    model: Model,
    balance: Annotated[
        float | None, Option(min=0, help="β: 0 counts images alike, 1 counts classes alike.")
    ] = None,
    strength: Annotated[float | None, Option(min=0, help="λ: the ridge. By default, it stays.")] = None,
    eval_: Eval = None,
) -> None:
    """Weigh the classes of an `analytic` model otherwise, as a new version, without any training."""
    from medcil.clinic.corrections.rebalance import rebalance as rebalance_model

    with can_be_interrupted(UNCHANGED):
        done = rebalance_model(model, balance=balance, strength=strength, eval=eval_)
    _show_forgetting(done)
    show(f"{printable(str(done.provenance['rebalanced']))}, from the same statistics.")
    _show_place(model, done.version)


def relabel(
    model: Model,
    corrections: Annotated[
        Path, Argument(metavar="CSV", help="Columns path and label: images, and the classes they are of.")
    ],
    images: Annotated[Path | None, Option(help="The images once more: the paths are below DIR.")] = None,
    eval_: Eval = None,
) -> None:
    """Move images of an `analytic` model to other classes, as a new version, without any training."""
    from medcil.clinic.corrections.relabel import relabel as relabel_images

    with can_be_interrupted(UNCHANGED):
        done = relabel_images(model, corrections, images=images, eval=eval_)
    _show_forgetting(done)
    show(f"Relabelled: {printable(str(done.provenance['corrected']))}.")
    _show_place(model, done.version)


def retire(
    model: Model, class_name: Annotated[str, Argument(metavar="CLASS", help="The class to withdraw.")]
) -> None:
    """Withdraw a class from an `analytic` model, as a new version, without any training."""
    from medcil.clinic.corrections.retire import retire as retire_class

    with can_be_interrupted(UNCHANGED):
        done = retire_class(model, class_name)
    _show_forgetting(done)
    show(f"Retired: {printable(class_name)}. Earlier versions still have it.")
    _show_place(model, done.version)


def merge(
    models: Annotated[
        list[Path], Argument(metavar="MODEL...", help="Models of `analytic` with the same frozen network.")
    ],
    out: Annotated[Path, out_option("The new model folder. An unfinished one is continued.")],
    rename: Annotated[
        Repeated, Option(help="CLASS=NAME: give a class another name. May be repeated.")
    ] = None,
    eval_: Eval = None,
    *,
    with_holdouts: Annotated[
        bool, Option("--with-holdouts", help="Copy the models' sealed images, to measure on.")
    ] = False,
    ridge_of_first: Annotated[
        bool,
        Option("--ridge-of-first", help="Take ρ of the first model, where images were erased or relabelled."),
    ] = False,
) -> None:
    """Join models that share a frozen network, as if one had been trained on all their images."""
    from medcil.clinic.measure import summary
    from medcil.clinic.merge import merge as merge_models

    with can_be_interrupted(CONTINUE):
        done = merge_models(
            *models,
            out=out,
            with_holdouts=with_holdouts,
            ridge_of_first=ridge_of_first,
            eval=eval_,
            rename=_new_names(rename or ()),
        )
    _show_counts(done.provenance["images"], done.provenance["holdout"], None)
    if done.metrics["images"]:
        _show_classes(done.metrics)
    show(summary(done.metrics))
    _show_place(out, done.version)


def _new_names(texts: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for text in texts:
        name, _, new = (part.strip() for part in text.partition("="))
        if not name or not new or name in names:
            raise InvalidInput(
                f"--rename {text!r}: write CLASS=NAME once for each class, as in nevus=NV.",
                code="option.rename.invalid",
            )
        names[name] = new
    return names


def history(model: Model) -> None:
    """List a model's versions: classes, dates, images, accuracy, and what each update cost."""
    from medcil.clinic.measure import change_of
    from medcil.clinic.update import history as versions_of
    from medcil.report.markup import percent

    columns = ("", "version", "written (UTC)", "added", "images", "balanced", "old classes", "")
    rows = []
    for past in versions_of(model):
        change = past["change_of_old_recall"]
        balanced = past["balanced_accuracy"]
        is_optimistic = past["measured_on"] == "exemplars" and balanced is not None
        row = (
            Text("*", "bold") if past["is_current"] else "",
            past["version"],
            past["when"][:16].replace("T", " "),
            change_of(past),
            f"{past['images']:,}",
            percent(balanced) + (" (optimistic)" if is_optimistic else ""),
            "" if change is None else f"{100 * change:+.1f} points",
            "" if past["is_promoted"] else "not promoted",
        )
        rows.append(row)
    show_table(columns, rows)
    show("[dim]* current[/]")


def rollback(
    model: Model,
    version: Annotated[str, Argument(metavar="VERSION", help="A version from `medcil history`.")],
) -> None:
    """Make another version of a model current; nothing is deleted."""
    from medcil.clinic.update import rollback as go_back

    before = go_back(model, version)
    show(f"{escape(str(model))}: [bold]{escape(version)}[/] is current, {before} was.")


@contextmanager
def _watches(label: str) -> Iterator["Watches"]:
    """Bars while images are checked and while the network learns; in between what was chosen."""
    from medcil.clinic.train import Watches

    with training_progress() as progress:
        bars = TrainingBars(progress, label)
        checking = progress.add_task("checking", visible=False, epoch="", losses="")

        def check(done: int, total: int) -> None:
            progress.update(checking, completed=done, total=total, visible=done < total)

        yield Watches(checking=check, settings=_show_choices, training=lambda now: bars(1, 1, now))


def _show_choices(choices: Sequence["Choice"], lesson: "Lesson") -> None:
    from medcil.clinic.measure import visible_losses

    show_remarks(lesson.table.remarks)
    known = None if lesson.parent is None else lesson.known_counts
    trained, sealed = (lesson.table.counts(places) for places in (lesson.train, lesson.sealed))
    _show_counts(trained, sealed, known)
    _warn_of_few_sealed(sealed, visible_losses(lesson.table, lesson.sealed, lesson.new_classes))
    _show_settings(choices)
    if lesson.parent is None and lesson.config.network.weights is None:
        from medcil.clinic.measure import RANDOM

        show(f"[bold yellow]Warning: {escape(RANDOM)}[/]")


def _show_counts(
    trained: Mapping[str, int], sealed: Mapping[str, int], known: Mapping[str, int] | None
) -> None:
    """Show the images of each class; in an update also from how many a class was learned before."""
    columns: tuple[str, ...] = ("class", "to train on", "sealed")
    rows: list[tuple[str, ...]] = [(name, f"{n:,}", f"{sealed[name]:,}") for name, n in trained.items()]
    if known is not None:
        columns = (*columns, "before")
        before = [f"{known[name]:,} images" if name in known else "new" for name in trained]
        rows = [(*row, state) for row, state in zip(rows, before, strict=True)]
    show_table(columns, rows)


def _warn_of_few_sealed(sealed: Mapping[str, int], losses: Mapping[str, float | None]) -> None:
    """Say which losses the sealed images of a class cannot show, the worst first."""
    wide = sorted((1.0 if loss is None else loss, name) for name, loss in losses.items())
    wide = [(loss, name) for loss, name in reversed(wide) if loss > VISIBLE]
    if not wide:
        return
    shown = [f"{100 * loss:.0f} points of {name} ({sealed[name]:,} sealed)" for loss, name in wide[:FEW]]
    others = f", and of {len(wide) - FEW} more" if len(wide) > FEW else ""
    line = f"A loss of less cannot be seen: {', '.join(shown)}{others}. Add images, or give --eval."
    show(f"[yellow]{printable(line)}[/]")


def _show_settings(choices: Sequence["Choice"]) -> None:
    if rows := [(choice.key, str(choice.value), choice.why) for choice in choices]:
        show_table(("setting", "value", "why"), rows)


def _show_plan(plan: "Plan") -> None:
    show_remarks(plan.remarks)
    would = "Would train, as" if plan.parent is None else f"Would add to {plan.parent}, as"
    show(f"{would} version [bold]{plan.version}[/]:")
    _show_counts(plan.images, plan.holdout, plan.known)
    _warn_of_few_sealed(plan.holdout, plan.visible_losses)
    _show_settings(plan.choices)
    took = "its pace is not known" if plan.seconds is None else f"about {duration(max(1, plan.seconds))}"
    n_images = f"{plan.images_per_epoch:,} images"
    work = f"{plan.epochs} epochs of {n_images}" if plan.epochs else f"One pass over {n_images}, no training"
    machine = "this machine" if plan.parent is None else f"a machine like the one that made {plan.parent}"
    show(f"{work}: {took} on {machine}. Nothing was written.")


def _show_forgetting(done: "Trained") -> None:
    from medcil.clinic.measure import FORGETTING_COLUMNS, forgetting_rows, verdict_or_note
    from medcil.report.markup import percent

    cost = done.forgetting
    show_table(FORGETTING_COLUMNS, forgetting_rows(cost))
    for key, what in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy")):
        before, after, every = cost[key].values()
        show(f"{what}: old classes {percent(before)} before, {percent(after)} after; all {percent(every)}.")
    for entry in cost["confusions"][:3]:
        images = "1 image" if entry["images"] == 1 else f"{entry['images']} images"
        show(f"{printable(entry['class'])} taken for {printable(entry['taken_for'])}: {images}")
    flipped = cost["flipped"]
    show(f"{len(flipped)} images of old classes are predicted otherwise than before.")
    for entry in flipped[:SHOWN]:
        line = f"  {entry['file']} ({entry['class']}): {entry['before']} before, {entry['after']} after"
        show(f"[dim]{printable(line)}[/]")
    if len(flipped) > SHOWN:
        show(f"[dim]  and {len(flipped) - SHOWN} more in forgetting.json[/]")
    show(f"[bold]{printable(verdict_or_note(cost))}[/]")


def _show_classes(metrics: dict[str, Any]) -> None:
    from medcil.clinic.measure import interval

    rows = [(entry["name"], str(entry["images"]), interval(entry)) for entry in metrics["classes"]]
    show_table(("class", "images", "recognized (95% interval)"), rows)


def _show_place(model: Path, version: str) -> None:
    show(
        f"Model: [bold]{escape(str(model))}[/] · version {version} · report: "
        f"{escape(str(model / 'versions' / version / 'report.html'))}"
    )


def erase(
    model: Model,
    patient: Annotated[str, Option(help="The patient's id, as it is in the data.")],
    images: Annotated[
        Path | None,
        Option(help="The patient's images once more, to subtract them from statistics."),
    ] = None,
) -> None:
    """Remove a patient's images and everything made of them from all versions of a model."""
    from medcil.clinic.erase import erase as erase_patient

    with can_be_interrupted("Run the same command again to finish it; until then images may remain."):
        done = erase_patient(model, patient, images=images)
    n_images = "1 image" if done.images == 1 else f"{done.images} images"
    show(f"Removed: {n_images}, and what was made of them. Rewritten: {', '.join(done.versions)}.")
    of_whom = "images of this patient"
    if done.summed_up:
        versions = ", ".join(done.summed_up)
        show(f"[bold]Not subtracted: the statistics of {versions} still contain {of_whom}.[/]")
    if done.subtracted:
        equal = "to how many digits is not known: the images were learned on another kind of device"
        equal = equal if done.digits is None else f"to {done.digits} digits"
        show(
            f"[bold]Subtracted from the statistics: {done.subtracted} images.[/] The classifier equals one "
            f"that never had them, on the same network, {equal}."
        )
    if done.trained:
        show(
            f"[bold]The weights are not unlearned.[/] Trained on {of_whom}: "
            f"{', '.join(done.trained)}. Only training again without them makes a model that never saw them."
        )
        if done.subtracted or done.summed_up:
            show("With `train --from MODEL`, or `method.adapt=never`, no network learns from a patient.")
    else:
        what = "network" if done.subtracted or done.summed_up else "version"
        show(f"No {what} was trained on {of_whom}.")
    for version, classes in done.without_exemplars.items():
        warn(
            f"{version} has no exemplar of {', '.join(classes)} any more: it still recognizes these classes, "
            "but an update will forget them sooner."
        )
    for name in done.thrown_away:
        show(f"Also removed, for it may have held images: {escape(name)}")
    if done.left:
        show(f"[yellow]Not looked into, for no part of a model: {escape(', '.join(done.left))}.[/]")
    show(
        "[dim]Copies, backups, exported files and predictions elsewhere are not reached; on most disks "
        "deleted bytes remain until they are written over.[/]"
    )
    if done.summed_up:
        way = (
            "Give the images once more: `medcil erase MODEL --patient ID --images DIR`."
            if done.is_recorded
            else "Only images of `analytic` that are on record can be: train again without them."
        )
        raise NotSubtracted(f"The patient's images are not subtracted from the statistics. {way}")


def predict(
    model: ModelOrFile,
    images: Annotated[list[str], Argument(metavar="IMAGES", help="Files, folders, archives or patterns.")],
    out: Annotated[Path, out_option("CSV file for the predictions.")] = Path("predictions.csv"),
    prior: Prior = "uniform",
    top_k: Annotated[int, Option(min=1, help="How many classes to name for each image.")] = 3,
    sensitivity: Annotated[Repeated, Option(help="CLASS=0.95: flag images to catch 95% of it.")] = None,
    abstain_below: Share = None,
    version: Version = None,
    device: Device = "auto",
    *,
    quiet: Annotated[bool, Option("--quiet", help="Print no table of the predictions.")] = False,
) -> None:
    """Classify images, and write a row for each with calibrated probabilities or why it cannot be read."""
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
    if not quiet:
        _show_predictions(found)
    for sentence in found.notes:
        note(sentence)
    prior_and_version = f"version {printable(found.version)}, prior {printable(found.prior.name)}"
    show(f"{len(found.rows):,} rows: [bold]{escape(str(out))}[/] ({prior_and_version})")


def _show_predictions(found: "Predictions") -> None:
    """Print a line for each of a few images; of many, how many are of each class."""
    answers = [row for row in found.rows if row.error is None]
    width = max(map(len, ("predicted", *found.class_names)))
    if len(found.rows) <= LISTED:
        show(f"[bold]{'predicted':{width}}  probability  image[/]")
        for row in found.rows:
            answer = (
                f"{'–':{width}}  {'–':>11}"
                if row.error
                else f"{row.predicted:{width}}  {row.probability:>11.1%}"
            )
            marks = {
                "cannot be read": row.error,
                "unlike anything known": row.is_unlike,
                "abstained": row.is_abstained,
            }
            remark = ", ".join(mark for mark, is_set in marks.items() if is_set)
            show(printable(f"{answer}  {row.file}{remark and f' ({remark})'}"))
        return
    shares = {
        name: [row.probability or 0 for row in answers if row.predicted == name] for name in found.class_names
    }
    rows = [
        (name, f"{len(own):,}", f"{sum(own) / len(own):.1%}" if own else "–")
        for name, own in sorted(shares.items(), key=lambda item: -len(item[1]))
    ]
    show_table(("predicted", "images", "mean probability"), rows, right=(1, 2))


def evaluate(
    model: ModelOrFile,
    data: Annotated[Path, Argument(metavar="DIR", help="Labeled images, in any layout that train reads.")],
    out: Annotated[Path, out_option("Folder for the figures and the page.")] = Path("evaluation"),
    prior: Prior = "uniform",
    grades: Annotated[str | None, Option(help="Classes in order, with commas, for quadratic kappa.")] = None,
    draws: Annotated[int, Option(min=0, help="Bootstrap draws for the intervals.")] = 1000,
    version: Version = None,
    device: Device = "auto",
    *,
    all_images: Annotated[bool, Option("--all", help="Use all images, also those of a train split.")] = False,
) -> None:
    """Measure a model on labeled images, by class, patient and subgroup, with intervals."""
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
        show_table(header, rows)
        show()
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


def export(
    model: Model,
    file_format: Annotated[Literal["onnx"], Option("--format", help="The format of the file.")] = "onnx",
    out: Annotated[Path | None, out_option("The file to write. By default, MODEL.onnx here.")] = None,
    version: Version = None,
) -> None:
    """Write a model as one file that predicts without torch, and check that both agree."""
    from medcil.clinic.export import export as export_model

    path = out or Path(f"{model.resolve().name}.{file_format}")
    with can_be_interrupted("No file was written."):
        exported = export_model(model, path, version=version)
    show(escape(exported.sentence()))
    name = escape(shlex.quote(str(path)))
    show(f"Predict with it: [bold]medcil predict {name} IMAGES -o predictions.csv[/]")


def explain(
    model: ModelOrFile,
    image: Annotated[Path, Argument(metavar="IMAGE", help="The image to explain.")],
    out: Annotated[Path, out_option("Folder for the figure and the page.")] = Path("explanation"),
    version: Version = None,
    device: Device = "auto",
) -> None:
    """Show which parts of an image led to the answer, and the exemplars nearest to it."""
    from medcil.clinic.explain import explain as explain_image

    with can_be_interrupted("Run the same command again to start over."):
        explanation = explain_image(model, image, out, version=version, execution=execution_on(device))
    first, second = explanation.classes
    show(
        f"[bold]{escape(first.name)}[/] {first.probability:.1%}, then {escape(second.name)} "
        f"{second.probability:.1%} (uniform prior, version {escape(explanation.version)})"
    )
    if explanation.is_unlike:
        show("[yellow]This image is unlike anything the model knows.[/]")
    show(f"Page: [bold]{escape(str(out / 'index.html'))}[/]")


def serve(
    model: Model,
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on. 0 chooses a free one.")] = 8000,
    host: Annotated[str, Option(help="Address to listen on. By default, this machine only.")] = "127.0.0.1",
    prior: Annotated[Path | None, Option(help="A file of class frequencies to offer on the page.")] = None,
    name: Annotated[Repeated, Option(help="Another host name of the page. May be repeated.")] = None,
    device: Device = "auto",
) -> None:
    """Open a local page for a model, with its predictions, explanations and versions."""
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
