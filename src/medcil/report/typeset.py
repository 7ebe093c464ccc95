"""Names as a reader expects them: `L_dm` and `λ_d` are symbols with an index, words between backticks are
code, everything else is plain text.

The same name is set in Markdown, HTML, LaTeX and figures; whatever it holds, it cannot leave its place.
"""

import html
import re
import unicodedata
from collections.abc import Callable

GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        re.findall(
            r"\w+",
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
            "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega",
        ),
        strict=True,
    )
)
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


def _set(
    text: str,
    plain: Callable[[str], str],
    symbol: Callable[[str, str], str],
    code: Callable[[str], str],
) -> str:
    """`symbol` gets the letter and its index, which may be empty; `code` words without their backticks."""
    parts, end = [], 0
    for found in SPECIAL.finditer(text):
        special = code(found[4]) if found[4] else symbol(found[1] or found[3], found[2] or "")
        parts += [plain(text[end : found.start()]), special]
        end = found.end()
    return "".join([*parts, plain(text[end:])])


def in_html(text: str) -> str:
    return _set(
        text,
        html.escape,
        lambda letter, index: f"{letter}<sub>{index}</sub>" if index else html.escape(letter),
        lambda words: f"<code>{html.escape(words)}</code>",
    )


def in_markdown(text: str) -> str:
    """In one line, as a cell of a table needs it."""

    def plain(part: str) -> str:
        return re.sub(
            r"([\\`*_\[\]|#~$])", r"\\\1", html.escape(" ".join(re.split(r"\s", part)), quote=False)
        )

    return _set(
        text,
        plain,
        lambda letter, index: f"{letter}<sub>{index}</sub>" if index else letter,
        lambda words: f"`{words}`",
    )


def in_latex(text: str) -> str:
    """For pdflatex: letters with accents stay, what the fonts do not have is named by its number."""

    def character(c: str) -> str:
        if c in LATEX:
            return LATEX[c]
        if c.isspace():
            return " "
        letter = unicodedata.normalize("NFD", c)[0]
        return c if (letter.isascii() and letter.isprintable()) or c in "ßæøåÆØÅ" else f"U+{ord(c):04X}"

    def symbol(letter: str, index: str) -> str:
        name = "\\" + GREEK[letter] if letter in GREEK else r"\mathcal{L}" if letter == "L" else letter
        return f"${name}_{{{index}}}$" if index else f"${name}$"

    def plain(part: str) -> str:
        return "".join(map(character, part)).replace("--set", "-{}-set")

    return _set(text, plain, symbol, lambda words: rf"\texttt{{{plain(words)}}}")


def in_figure(text: str) -> str:
    """Matplotlib's own mathematics; a dollar sign is meant as one."""
    return _set(
        text,
        lambda part: part.replace("$", r"\$"),
        lambda letter, index: f"${letter}_{{{index}}}$" if index else letter,
        lambda words: words,
    )
