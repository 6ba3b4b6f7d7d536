"""Renders `docs/dashboard.md`, which the package carries, as the console's help page. Pure text.

Pictures are left out, and HTML except anchors. Links within the document stay links; other documents are named only,
since the console does not have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

MAIN = re.compile(rb'(?<=<main id="main">).*?(?=</main>)', re.DOTALL)
"""The part of the shell that a page replaces."""
ANCHOR = re.compile(r'<a id="[\w-]+">|</a>')
SECTION, END = '<section class="panel wide help">', "</section>"


def help_page(document: str, shell: bytes) -> bytes:
    """Put the document into the shell of all pages."""
    reader = MarkdownIt("commonmark", renderer_cls=_Renderer).enable("table")
    text = f"{SECTION}{reader.render(document)}{END}"
    return MAIN.sub(lambda _: text.encode(), shell, count=1)


class _Renderer(RendererHTML):
    """A method is named after the token that it renders."""

    def heading_open(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        tag, title = tokens[at].tag, tokens[at + 1].content
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # GitHub's anchor names
        return f'{END + SECTION if tag == "h2" else ""}<{tag} id="{anchor}">'

    def table_open(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return '<div class="scroll" tabindex="0"><table>'

    def table_close(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return "</table></div>"

    def image(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return ""

    def html_inline(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        text = tokens[at].content
        return text if ANCHOR.fullmatch(text) else escape(text)

    def html_block(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        return self.html_inline(tokens, at, options, env)

    def link_open(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        to = str(tokens[at].attrs["href"])
        return f'<a href="{escape(to)}">' if to.startswith("#") else ""

    def link_close(self, tokens: Sequence[Token], at: int, options: Any, env: Mapping[str, Any]) -> str:
        opened = max(before for before in range(at) if tokens[before].type == "link_open")
        to, text = str(tokens[opened].attrs["href"]), "".join(one.content for one in tokens[opened + 1 : at])
        if to.startswith("#"):
            return "</a>"
        return "" if text == to else f" (<code>{escape(to.removeprefix('../'))}</code>)"
