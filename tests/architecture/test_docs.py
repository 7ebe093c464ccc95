"""Pages point to what exists: files, headings, modules, functions, commands and options."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

import medcil
from medcil.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("results/*.md"),
        *ROOT.glob("results/*/README.md"),
    ]
)
SOURCE = ROOT / "src" / "medcil"
PAGE_OF_THE_TREE = ROOT / "docs/explanation/architecture.md"
SHELL = [page for page in PAGES if page.relative_to(ROOT).parts[0] != "results"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, *kinds: str) -> list[str]:
    """Return the page's blocks of code of these languages; "" is a block that names none."""
    return [code for kind, code in FENCE.findall(page.read_text(encoding="utf-8")) if kind in kinds]


def anchors(page: Path) -> set[str]:
    """Name the headings as Markdown viewers do."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def broken_link(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    place = (page.parent / path).resolve() if path else page
    return not place.exists() or bool(anchor and place.suffix == ".md" and anchor not in anchors(place))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(<?([^)\s>]+)>?\)", prose(page))
    inside = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in inside if broken_link(page, link)] == []


def test_the_tree_of_the_architecture_page_is_that_of_the_source():
    """Every file but an `__init__.py`, some of which are not listed; folders of other files as a whole."""
    tree = next(block for block in blocks(PAGE_OF_THE_TREE, "") if block.startswith("src/medcil/"))
    folders, listed = [""], set()
    for line in tree.splitlines()[1:]:
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [folders[depth - 1] + name]
        listed |= {folders[depth]} if name.endswith(".py") else set()
        assert (SOURCE / folders[depth]).exists(), line
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    assert {file for file in files ^ listed if not file.endswith("__init__.py")} == set()


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\(([^)#]+)\)", prose(ROOT / "docs/README.md")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/*/*.md")}
    assert len(pages) > 20
    assert pages - linked == set()


@pytest.mark.parametrize("page", SHELL, ids=named)
def test_python_examples_use_what_exists(page):
    for node in (node for block in blocks(page, "python", "py") for node in ast.walk(parsed(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("medcil"):
            if node.module != "medcil.methods.lwf":  # the page on adding a method adds it
                assert {alias.name for alias in node.names} <= {*dir(importlib.import_module(node.module))}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "medcil":
            assert hasattr(medcil, node.attr)


def parsed(block: str) -> ast.AST:
    """Parse an example; a signature alone, as the page on losses has them, is no example."""
    try:
        return ast.parse(block)
    except SyntaxError:
        assert "*" in block
        return ast.Module([], [])


@pytest.mark.parametrize("page", SHELL, ids=named)
def test_commands_have_the_options_that_examples_give(page):
    commands = typer.main.get_command(app).commands
    text = "\n".join(blocks(page, "", "sh", "console")).replace("\\\n", "")
    for line in re.findall(r"^ *(?:\$ )?medcil ([a-z].*)$", text, re.MULTILINE):
        name, *arguments = shlex.split(line.split(" ||")[0].split(" | ")[0], comments=True)
        command = commands[name]
        if arguments and (subcommand := getattr(command, "commands", {}).get(arguments[0])):
            command = subcommand
        known = {
            option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]
        }
        given = {argument.split("=")[0] for argument in arguments if re.match(r"--?[a-z]", argument)}
        assert given - known - {"--help"} == set(), line
