"""Rules of the house that can be read off the source itself."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "medcil"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def nodes(*kinds: type[ast.AST]) -> list[tuple[str, ast.AST]]:
    return [
        (name_of(p), node) for p, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kinds)
    ]


def dotted(node: ast.AST) -> str:
    """Spell a chain of names, such as `os.environ`; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported_modules() -> list[tuple[str, str]]:
    imported = []
    for file, node in nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            imported += [(file, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [(file, f"{node.module}.{alias.name}") for alias in node.names]
    return imported


def test_the_source_is_read():
    assert {"cli/main.py", "training/loop.py", "methods/balanced.py"} <= {name_of(path) for path in FILES}


def test_one_place_computes_gradients_for_training():
    calls = [
        file
        for file, node in nodes(ast.Call)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]
    assert calls == ["training/step.py"]


def test_imports_go_down_only():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(lint), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contract_of_training_lists_every_particular_method():
    """All of methods but its vocabulary: what training may import."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {found["name"]: found for found in settings["tool"]["importlinter"]["contracts"]}
    forbidden = contracts["training knows Method, never a particular method"]["forbidden_modules"]
    vocabulary = {"__init__", "protocol", "memory", "terms", "outline"}
    particular = {path.stem for path in (SOURCE / "methods").glob("*.py")} - vocabulary
    assert {name.removeprefix("medcil.methods.") for name in forbidden} == particular


def test_reports_metrics_and_the_command_line_import_no_torch():
    light = ("report", "metrics", "config", "storage", "errors", "cli")
    paths = [path.relative_to(SOURCE).with_suffix("") for path in FILES]
    names = [".".join(("medcil", *path.parts)) for path in paths if path.parts[0] in light]
    modules = [name.removesuffix(".__init__") for name in names]
    code = f"import sys, {', '.join(modules)}; print({{'torch', 'torchvision', 'timm'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_file_name_says_what_is_inside():
    vague = {"utils", "util", "core", "common", "base", "helpers", "helper", "misc"}
    assert [name_of(p) for p in SOURCE.rglob("*") if p.stem in vague] == []


def test_every_class_name_says_what_it_is():
    vague = re.compile(r"(Manager|Helper|Factory)$|^_?(Base|Abstract)[A-Z]")
    assert [(file, node.name) for file, node in nodes(ast.ClassDef) if vague.search(node.name)] == []


def test_one_class_name_exists_once():
    files_of: dict[str, list[str]] = {}
    for file, node in nodes(ast.ClassDef):
        files_of.setdefault(node.name, []).append(file)
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


def test_nothing_is_configured_by_environment_variables():
    """They may be set for the libraries below, never read; one says where a user's files belong (XDG)."""
    setting = {id(node.value) for _, node in nodes(ast.Attribute) if dotted(node) == "os.environ.setdefault"}
    setting |= {id(node.value) for _, node in nodes(ast.Subscript) if isinstance(node.ctx, ast.Store)}
    place = "os.environ.get('XDG_DATA_HOME', '')"
    of_place = [
        node.func
        for file, node in nodes(ast.Call)
        if (file, ast.unparse(node)) == ("models/weights.py", place)
    ]
    setting |= {id(node.value) for node in of_place if isinstance(node, ast.Attribute)}
    reads = {"os.environ", "os.getenv", "os.environb"}
    used = [(file, dotted(node)) for file, node in nodes(ast.Attribute) if id(node) not in setting]
    assert [(file, name) for file, name in used + imported_modules() if name in reads] == []


def test_nothing_read_can_run_code():
    """A pickle is read by a restricted `Unpickler` or PyTorch's own, an array file without its objects."""
    executing = re.compile(
        r"(^|\.)(c?[pP]ickle|dill|cloudpickle|joblib|shelve|marshal)(\.|$)|^torch\.(load|save)$"
    )
    unpicklers = {
        file
        for file, node in nodes(ast.ClassDef)
        if any(dotted(base) == "pickle.Unpickler" for base in node.bases)
        and any(isinstance(part, ast.FunctionDef) and part.name == "find_class" for part in node.body)
    }
    restricted = {"pickle", "pickle.Unpickler", "pickle.UnpicklingError"}
    restricted_loads = {
        id(node.func)
        for _, node in nodes(ast.Call)
        if dotted(node.func) == "torch.load" and "weights_only=True" in map(ast.unparse, node.keywords)
    }
    attributes = [
        (file, dotted(node)) for file, node in nodes(ast.Attribute) if id(node) not in restricted_loads
    ]
    assert [
        (file, name)
        for file, name in imported_modules() + attributes
        if executing.search(name) and not (file in unpicklers and name in restricted)
    ] == []
    loads = [(file, node) for file, node in nodes(ast.Call) if dotted(node.func) in ("np.load", "numpy.load")]
    safe = "allow_pickle=False"
    assert [file for file, node in loads if safe not in map(ast.unparse, node.keywords)] == []


def test_methods_are_one_page():
    lengths = {
        p.name: len(p.read_text(encoding="utf-8").splitlines())
        for p in (SOURCE / "methods").glob("*.py")
        if p.name not in ("protocol.py", "terms.py", "memory.py", "outline.py", "presets.py")
    }
    assert {file: n for file, n in lengths.items() if n > 120} == {}


def test_functions_are_short():
    lengths = {
        (file, node.name): node.end_lineno - node.lineno + 1
        for file, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    }
    assert {function: n for function, n in lengths.items() if n > 65} == {}


def test_no_tracked_file_names_a_folder_of_someones_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    private = re.compile(rb"(?<![\w.])/(?:work|home|root|Users|mnt|scratch)/\w|[A-Z]:\\+Users")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert len(paths) > 50
    assert [str(p.relative_to(ROOT)) for p in paths if private.search(p.read_bytes())] == []
