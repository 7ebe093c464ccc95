"""Format numbers, escape names for Markdown, HTML, LaTeX and figures, and render templates.

`L_dm` and `λ_d` are symbols with an index, words between backticks are code, everything else is plain text,
whatever a name contains.
"""

import base64
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# Okabe and Ito's palette without its yellow: told apart by color-blind readers, dark enough for white paper.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6B7280")

GREEK = {
    letter: unicodedata.name(letter).split()[-1].replace("LAMDA", "LAMBDA")  # Unicode's spelling
    for letter in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
}
SPECIAL = re.compile(
    rf"(?<!\w)([A-Za-z{''.join(GREEK)}])_([A-Za-z0-9]+)(?!\w)|([{''.join(GREEK)}])|`([\w.]+(?: [\w.]+)*)`"
)
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "[": "{[}",
    "]": "{]}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "→": r"$\to$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "’": "'",
    "‘": "`",
    "“": "``",
    "”": "''",
    "²": r"$^2$",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def number(value: float) -> str:
    """Format with one decimal, without the sign of a zero."""
    return f"{round(value, 1) + 0.0:.1f}".replace("-", "−")


def points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} points"


def shortened(name: str, n: int) -> str:
    return name if len(name) <= n else name[: n - 1] + "…"


def _typeset(
    text: str,
    plain: Callable[[str], str],
    symbol: Callable[[str, str], str],
    code: Callable[[str], str],
) -> str:
    """Pass each part of a text to its writer: plain text, a letter with its index (may be empty), code."""
    parts, end = [], 0
    for match in SPECIAL.finditer(text):
        special = code(match[4]) if match[4] else symbol(match[1] or match[3], match[2] or "")
        parts += [plain(text[end : match.start()]), special]
        end = match.end()
    return "".join([*parts, plain(text[end:])])


def _html_symbol(letter: str, index: str) -> str:
    return f"{letter}<sub>{index}</sub>" if index else letter


def in_html(text: str) -> str:
    return _typeset(text, html.escape, _html_symbol, lambda words: f"<code>{words}</code>")


def plain_markdown(text: str) -> str:
    """Escape text for one line of Markdown, such as a cell of a table; none of it is markup."""
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", html.escape(" ".join(re.split(r"\s", text)), quote=False))


def in_markdown(text: str) -> str:
    return _typeset(text, plain_markdown, _html_symbol, lambda words: f"`{words}`")


def in_latex(text: str) -> str:
    """Escape for pdflatex; a character that its fonts lack is written as its number."""

    def character(c: str) -> str:
        if c in LATEX:
            return LATEX[c]
        if c.isspace():
            return " "
        letter = unicodedata.normalize("NFD", c)[0]
        return c if (letter.isascii() and letter.isprintable()) or c in "ßæøåÆØÅ" else f"U+{ord(c):04X}"

    def symbol(letter: str, index: str) -> str:
        name = r"\mathcal{L}" if letter == "L" else letter
        if letter in GREEK:
            name = "\\" + (GREEK[letter].capitalize() if letter.isupper() else GREEK[letter].lower())
        return f"${name}_{{{index}}}$" if index else f"${name}$"

    def plain(part: str) -> str:
        return "".join(map(character, part)).replace("--set", "-{}-set")

    return _typeset(text, plain, symbol, lambda words: rf"\texttt{{{plain(words)}}}")


def in_figure(text: str) -> str:
    """Escape for Matplotlib, whose mathematics writes the symbols."""
    return _typeset(
        text,
        lambda part: part.replace("$", r"\$"),
        lambda letter, index: f"${letter}_{{{index}}}$" if index else letter,
        str,
    )


@cache
def environment() -> Environment:
    """Return the Jinja environment of every page; it escapes all text and refuses unknown names."""
    pages = Environment(
        loader=PackageLoader("medcil.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    typeset = {"typeset": lambda text: Markup(in_html(str(text))), "md": in_markdown, "tex": in_latex}
    pages.filters |= {**typeset, "plain_md": plain_markdown, "percent": percent, "points": points}
    pages.filters["number"] = lambda share: "–" if share is None else number(100 * share)
    return pages


def render(template: str, **content: Any) -> str:
    """Render a page of templates/, with the style of all pages."""
    return environment().get_template(template).render({"style": Markup(asset("page.css")), **content})


def render_text(template: str, **content: Any) -> str:
    """Render Markdown or LaTeX, where `<%` and `<<` mark what is replaced and names pass a filter."""
    texts = environment().overlay(
        autoescape=False,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        keep_trailing_newline=True,
    )
    return texts.get_template(template).render(content)


def render_with_charts(template: str, charts: Any, **content: Any) -> str:
    """Render a page that draws Plotly figures; its content security policy allows its own scripts alone."""
    from plotly.offline import get_plotlyjs

    script, plotly = asset("page.js"), get_plotlyjs()
    return render(
        template,
        charts=_json_for_script(charts),
        plotly=Markup(plotly),
        script=Markup(script),
        script_hashes=" ".join(map(_source_hash, (plotly, script))),
        **content,
    )


def asset(name: str) -> str:
    return resources.files("medcil.report").joinpath("templates", name).read_text(encoding="utf-8")


def data_uri(kind: str, content: bytes) -> str:
    """Embed a picture; identifiers inside one SVG cannot clash with those of another."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _json_for_script(content: object) -> Markup:
    """Write JSON that cannot end the script element around it, whatever the names in it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _source_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
