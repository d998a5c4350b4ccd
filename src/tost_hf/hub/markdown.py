# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Text from files and arguments as parts of a Markdown page, escaped for where it stands."""

import json
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote


# but for tabs and line breaks: what cannot be seen, and what turns the direction of writing around
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_HIDDEN_OR_FENCE = re.compile(f"{_INVISIBLE.pattern}|`")
# what starts markup; an underscore does so only at the edge of a word
_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|(?<=http):(?=//)|(?<=https):(?=//)|(?<=www)\.", re.IGNORECASE)


def escape(text: str) -> str:
    """One line of plain text as Markdown that shows it: no emphasis, link, image, formula or HTML comes of it."""
    return _MARKUP.sub(r"\\\g<0>", _one_line(text).replace("&", "&amp;").replace("<", "&lt;"))


def code(text: str) -> str:
    """One line of text as code within a line."""
    text = _one_line(text)
    mark = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{mark}{space}{text}{space}{mark}"


def code_block(text: str, language: str) -> str:
    """A fenced block of code, with a fence that nothing in the text can close."""
    fence = "`" * max(3, _longest_run(text) + 1)
    text = _INVISIBLE.sub("", "\n".join(text.splitlines()))
    return f"{fence}{language}\n{text}\n{fence}"


def _one_line(text: str) -> str:
    return _INVISIBLE.sub("", " ".join(text.split()))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def python_literal(text: str) -> str:
    """Text as a string literal of Python, on one line, in double quotes and without backticks, which would end a block."""
    literal = json.dumps(text, ensure_ascii=False)  # Python knows all of JSON's escapes
    return _HIDDEN_OR_FENCE.sub(lambda found: f"\\u{ord(found[0]):04x}", literal)


def link(name: str, address: str) -> str:
    """A link to the page of `name` under an address."""
    return f"[{escape(name)}]({address}/{quote(name)})"


def table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A table without the columns that have no value at all; where it has two columns, without the rows that have none."""
    rows = [["" if cell is None else escape(str(cell)) for cell in row] for row in rows]
    if len(header) == 2:
        rows = [row for row in rows if row[1]]
    columns = [i for i in range(len(header)) if any(row[i] for row in rows)]
    if not rows:
        return ""

    def line(row: Sequence[str]) -> str:
        return "|" + "|".join(f" {row[i]} " if row[i] else " " for i in columns) + "|"

    return "\n".join([line(header), "|---" * len(columns) + "|", *map(line, rows)])


def number(value: float | None) -> str | None:
    """A number as people write it: thousands separated, or six significant digits."""
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def duration(seconds: float) -> str:
    """Seconds in words, such as "1 h 2 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
