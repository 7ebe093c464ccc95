"""Names and tables in LaTeX: nothing in a name is a command, and the document compiles."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from medcil.report.markup import in_figure, in_html, in_latex, in_markdown
from medcil.report.results import read_results
from medcil.report.suite import write_tables

from .fake_results import suite_of, write_fake_results

HOSTILE = r"50% & \input{x} $y$ #1 ~ ^ {a} a_b <b> “c” [d] | é ß 中 α → ±"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iCaRL + L_cbc", r"iCaRL + $\mathcal{L}_{cbc}$"),
        ("λ_d = 0.1, α", r"$\lambda_{d}$ = 0.1, $\alpha$"),
        ("a_b & 5%", r"$a_{b}$ \& 5\%"),
        ("acc_micro", r"acc\_micro"),
        ("[+1.0, −2.0]", "{[}+1.0, $-$2.0{]}"),
        ("中", "U+4E2D"),
        ("--set x", "-{}-set x"),
    ],
)
def test_latex(text: str, expected: str) -> None:
    assert in_latex(text) == expected


def test_no_character_of_a_name_is_a_command() -> None:
    text = in_latex(HOSTILE)
    assert r"\input" not in text.replace(r"\textbackslash{}input", "")
    plain = re.sub(r"\\[%&$#_{}]|\\[a-z]+(\{\})?|\$[^$]*\$|\{\[\}|\{\]\}", "", text)
    assert not set(plain) & set("\\%&$#_{}~^<>|")


def test_markdown_html_and_figures() -> None:
    assert in_markdown("a|b *c* L_dm\n[x]") == r"a\|b \*c\* L<sub>dm</sub> \[x\]"
    assert in_html("<b> & L_dm α") == "&lt;b&gt; &amp; L<sub>dm</sub> α"
    assert in_figure("$5 L_dm") == r"\$5 $L_{dm}$"


def written(tmp_path: Path, **changes: Any) -> Path:
    folder = write_fake_results(tmp_path, suite_of(figures=[], **changes))
    write_tables(read_results(folder))
    return folder / "tables" / "made.tex"


def test_rows_are_whole(tmp_path: Path) -> None:
    """As many columns in every line as the table announces."""
    text = written(tmp_path).read_text(encoding="utf-8")
    for columns, body in re.findall(r"\\begin\{tabular\}\{(l+r+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        lines = [line for line in body.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert len(lines) >= 4
        assert {len(re.split(r"(?<!\\)&", line)) for line in lines} == {len(columns)}


def test_the_document_compiles(tmp_path: Path) -> None:
    compiler = next((found for name in ("pdflatex", "tectonic") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("not compiled: no pdflatex and no tectonic here")
    table = written(
        tmp_path,
        rows={"iCaRL": {}, "iCaRL + L_dm": {}, HOSTILE: {}, "balanced": {}},
        title=HOSTILE,
        seeds=[0, 1],
    )
    options = ["-interaction=nonstopmode", "-halt-on-error"] if "pdflatex" in compiler else []
    done = subprocess.run(
        [compiler, *options, "made-standalone.tex"], cwd=table.parent, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-3000:]
    assert (table.parent / "made-standalone.pdf").stat().st_size > 10_000
