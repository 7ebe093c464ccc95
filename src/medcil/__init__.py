"""Class-incremental learning for imbalanced medical images.

The names below are public, as are `medcil.losses`, `medcil.metrics` and the modules `terms` and `protocol`
of `medcil.methods`. Each is imported when it is first used, so that `import medcil` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medcil.build import RunConfig as RunConfig
    from medcil.build import load_recipe as load_recipe
    from medcil.build import parse_recipe as parse_recipe
    from medcil.build import register as register
    from medcil.clinic.corrections.rebalance import rebalance as rebalance
    from medcil.clinic.corrections.relabel import relabel as relabel
    from medcil.clinic.corrections.retire import retire as retire
    from medcil.clinic.erase import erase as erase
    from medcil.clinic.evaluate import evaluate as evaluate
    from medcil.clinic.explain import explain as explain
    from medcil.clinic.export import export as export
    from medcil.clinic.merge import merge as merge
    from medcil.clinic.predict import predict as predict
    from medcil.clinic.train import train as train
    from medcil.clinic.update import history as history
    from medcil.clinic.update import rollback as rollback
    from medcil.clinic.update import update as update
    from medcil.data.samples import Samples as Samples
    from medcil.data.samples import TensorImages as TensorImages
    from medcil.data.sources import DATASETS as DATASETS
    from medcil.data.stream import Task as Task
    from medcil.data.stream import class_incremental as class_incremental
    from medcil.experiments.run import run_experiment as run_experiment
    from medcil.methods import METHODS as METHODS
    from medcil.serving import serve as serve
    from medcil.training.inference import predict_scores as predict_scores
    from medcil.training.loop import learn_task as learn_task
    from medcil.training.state import State as State
    from medcil.training.state import load_state as load_state
    from medcil.training.state import save_state as save_state

_NAMES = {
    "medcil.build": "RunConfig load_recipe parse_recipe register",
    "medcil.clinic.erase": "erase",
    "medcil.clinic.evaluate": "evaluate",
    "medcil.clinic.explain": "explain",
    "medcil.clinic.export": "export",
    "medcil.clinic.merge": "merge",
    "medcil.clinic.predict": "predict",
    "medcil.clinic.corrections.rebalance": "rebalance",
    "medcil.clinic.corrections.relabel": "relabel",
    "medcil.clinic.corrections.retire": "retire",
    "medcil.clinic.train": "train",
    "medcil.clinic.update": "history rollback update",
    "medcil.data.samples": "Samples TensorImages",
    "medcil.data.sources": "DATASETS",
    "medcil.data.stream": "Task class_incremental",
    "medcil.experiments.run": "run_experiment",
    "medcil.methods": "METHODS",
    "medcil.serving": "serve",
    "medcil.training.inference": "predict_scores",
    "medcil.training.loop": "learn_task",
    "medcil.training.state": "State load_state save_state",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'medcil' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
