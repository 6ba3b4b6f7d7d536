"""The console's own help: `docs/dashboard.md`, which the package carries, as a page of the console. Pure text.

It reads the forms which that document has: headings, paragraphs, tables, code, emphasis, links, and anchors. Pictures
are left out. Links to places in it stay links; other documents are named, since the console does not have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

MAIN = re.compile(rb'(?<=<main id="main">).*?(?=</main>)', re.DOTALL)
"""What the shell of all pages shows until there is a page."""
HEADING = re.compile(r"(#{1,3}) (.+)")
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
INLINE = re.compile(
    r'<a id="(?P<id>[\w-]+)"></a>|`(?P<code>[^`]+)`|\[(?P<text>[^\]]+)\]\((?P<to>[^)]+)\)'
    r"|(?<!\w)\*(?P<stressed>[^*]+)\*"
)


def help_page(document: str, shell: bytes) -> bytes:
    """The document in the shell of all pages."""
    text = "".join(_sections(document))
    return MAIN.sub(lambda _: text.encode(), shell, count=1)


def _sections(document: str) -> Iterator[str]:
    yield '<section class="panel wide help">'
    for block in re.split(r"\n\s*\n|\n(?=#)|(?<=\n)(?=#)", document):
        lines = PICTURE.sub("", block).strip().splitlines()
        heading = HEADING.fullmatch(lines[0]) if lines else None
        if heading:
            level, title = len(heading[1]), heading[2]
            if level == 2:
                yield '</section><section class="panel wide help">'
            yield f'<h{level} id="{_anchor(title)}">{_inline(title)}</h{level}>'
            lines = lines[1:]
        if lines and lines[0].startswith("|"):
            yield _table(lines)
        elif lines:
            yield f"<p>{_inline(' '.join(lines))}</p>"
    yield "</section>"


def _anchor(title: str) -> str:
    """As GitHub names it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _table(lines: list[str]) -> str:
    rows = [[_inline(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
    head, body = rows[0], rows[2:]  # between them is the line of dashes

    def row(tag: str, cells: list[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"

    return (
        f'<div class="scroll" tabindex="0"><table><thead>{row("th", head)}</thead>'
        f"<tbody>{''.join(row('td', cells) for cells in body)}</tbody></table></div>"
    )


def _inline(text: str) -> str:
    made, at = [], 0
    for found in INLINE.finditer(text):
        made.append(escape(text[at : found.start()]))
        at = found.end()
        if found["id"]:
            made.append(f'<a id="{found["id"]}"></a>')
        elif found["code"]:
            made.append(f"<code>{escape(found['code'])}</code>")
        elif found["stressed"]:
            made.append(f"<em>{_inline(found['stressed'])}</em>")
        elif found["to"].startswith("#"):
            made.append(f'<a href="{escape(found["to"])}">{_inline(found["text"])}</a>')
        else:
            made.append(_inline(found["text"]))
            if found["text"].strip("`") != found["to"]:
                made.append(f" (<code>{escape(found['to'].removeprefix('../'))}</code>)")
    return "".join([*made, escape(text[at:])])
