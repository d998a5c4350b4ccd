# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Text from files and arguments as parts of a Markdown page, escaped for where it stands."""

import json
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote


# control characters and bidirectional overrides, but for tabs and line breaks
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_INVISIBLE_OR_FENCE = re.compile(f"{_INVISIBLE.pattern}|`")
# what starts markup; an underscore does so only at the edge of a word
_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|(?<=http):(?=//)|(?<=https):(?=//)|(?<=www)\.", re.IGNORECASE)


def escape(text: str) -> str:
    """One line of plain text as Markdown that shows it: no emphasis, link, image, formula or HTML comes of it."""
    line = _INVISIBLE.sub("", " ".join(text.split()))
    return _MARKUP.sub(r"\\\g<0>", line.replace("&", "&amp;").replace("<", "&lt;"))


def code_block(text: str, language: str) -> str:
    """A fenced block of code, with a fence that nothing in the text can close."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    text = _INVISIBLE.sub("", "\n".join(text.splitlines()))
    return f"{fence}{language}\n{text}\n{fence}"


def python_string(text: str) -> str:
    """Text as a Python string, on one line, in double quotes and without backticks, which would end a block."""
    quoted = json.dumps(text, ensure_ascii=False)  # Python knows all of JSON's escapes
    return _INVISIBLE_OR_FENCE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def link(name: str, address: str) -> str:
    """A link to the page of `name` under an address."""
    return f"[{escape(name)}]({address}/{quote(name)})"


def table(header: Sequence[str], records: Iterable[Sequence]) -> str:
    """A Markdown table without empty columns; where it has two columns, without the records that have no value."""
    cells = [["" if cell is None else escape(str(cell)) for cell in record] for record in records]
    if len(header) == 2:
        cells = [record for record in cells if record[1]]
    columns = [i for i in range(len(header)) if any(record[i] for record in cells)]
    if not cells:
        return ""
    lines = [[f" {record[i]} " if record[i] else " " for i in columns] for record in (header, *cells)]
    lines.insert(1, ["---"] * len(columns))
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def number(value: float | None) -> str | None:
    """A number as people write it: thousands separated, or six significant digits."""
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
