# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The sections of a model card: which of them were generated, which a person wrote, and how the two are joined.

Every generated section ends with a comment that holds a hash of its text, by which an unchanged one is known again.
"""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCard

from .markdown import escape, unescape


_MARK = re.compile(r"\s*<!-- tost_hf ([0-9a-f]{8}) -->\s*$")  # the last line, as the text may quote others
_TRAINER_DRAFT = "generated automatically according to the information the Trainer had access to"
_DRAFT_LINE = re.compile(  # what Trainer and push_to_hub leave to be filled in, or say of themselves
    r"\[More Information Needed\]|^More information needed$|^Users \(both direct and downstream\) should be made aware"
    r"|^This is the model card of a 🤗 transformers model|pushed without a model card\.$|^# Model Card for Model ID$",
    re.MULTILINE,
)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


class Section(NamedTuple):
    """A section of level two: its heading line ("" for what stands before the first) and its whole text."""

    title: str
    text: str


def is_trainers_draft(text: str) -> bool:
    """Whether a card is the draft that `Trainer` writes."""
    return _TRAINER_DRAFT in text


def hyperparameters(text: str) -> list[str]:
    """The lines of a card's list of hyperparameters: Trainer's, whose only other copy is a pickle, or ours made of it."""
    _, _, after = text.partition("### Training hyperparameters\n")
    lines = []
    for line in after.splitlines():
        if line.startswith("#"):
            break
        if line.startswith("- "):
            lines.append(f"- {escape(unescape(line[2:]))}")
    return lines


def split_sections(text: str) -> list[Section]:
    """The sections of a card's text, in order."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    fence = ""
    for line in text.split("\n"):
        fence = _open_fence(line, fence)
        if not fence and line.startswith("## "):
            sections.append((line.strip(), []))
        sections[-1][1].append(line)
    return [Section(title, "\n".join(lines).strip()) for title, lines in sections]


def _open_fence(line: str, fence: str) -> str:
    """The fence of the block of code that is open after a line, "" if none is; `fence` is the one open before it."""
    found = _FENCE.match(line)
    if not found:
        return fence
    mark, rest = found.groups()
    if not fence:
        return "" if mark[0] == "`" and "`" in rest else mark
    return "" if mark.startswith(fence) and not rest.strip() else fence


def mark_sections(text: str) -> str:
    """The text of a generated card, with its mark at the end of each section."""
    return join_sections(
        [Section(title, f"{text}\n\n<!-- tost_hf {_digest(text)} -->") for title, text in split_sections(text)]
    )


def join_sections(sections: list[Section]) -> str:
    """The text of a card of these sections."""
    return "\n" + "\n\n".join(section.text for section in sections) + "\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:8]


def _is_generated(text: str) -> bool:
    """Whether a section still is as it was generated."""
    mark = _MARK.search(text)
    return mark is not None and _digest(text[: mark.start()]) == mark[1]


def merge(old: str, new: str) -> str:
    """A newly generated card's text, in which the sections of the old card that a person wrote or changed keep their place."""
    merged, place = split_sections(new), 1
    drafted = is_trainers_draft(old)
    for title, text in split_sections(old):
        index = next((i for i, section in enumerate(merged) if section.title == title), None)
        kept = _written_by_a_person(title, text, drafted)
        if kept and index is not None and _is_generated(merged[index].text):
            merged[index] = Section(title, kept)
        elif kept:
            merged.insert(place, Section(title, kept))
            index = place
        if index is not None:
            place = index + 1
    return join_sections(merged)


def _written_by_a_person(title: str, text: str, drafted: bool) -> str:
    """What is to be kept of a section of the existing card: nothing of one that a program wrote."""
    if not text or _is_generated(text) or (drafted and title in ("", "## Training procedure")):
        return ""
    if not _DRAFT_LINE.search(text):
        return text
    # a form, huggingface_hub's or Trainer's: a person filled it in where it has lines that the form has not
    form = set(Path(ModelCard.default_template_path).read_text(encoding="utf-8").splitlines())
    lines = [line for line in text.split("\n") if not _DRAFT_LINE.search(line)]
    filled_in = any(line and line not in form and not line.startswith(("#", "<!--")) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() if filled_in else ""
