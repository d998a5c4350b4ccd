"""Hooks of MkDocs: a silent strict build, the notebooks as pages, and a link to the repository that fetches nothing."""

import base64
import json
import logging
import re

from mkdocs.structure.files import File


def on_startup(**kwargs):
    """Prints warnings only; `--quiet` would hide them from `--strict` too."""
    logging.getLogger("mkdocs").setLevel(logging.WARNING)


def on_files(files, config):
    """Adds a page, and its pictures, for each notebook."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        stem = notebook.src_uri.removesuffix(".ipynb")
        markdown, pictures = render_notebook(json.loads(notebook.content_string), stem.rpartition("/")[2])
        files.append(File.generated(config, f"{stem}.md", content=markdown))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{stem.rpartition('/')[0]}/{name}", content=content))
    return files


def on_page_markdown(markdown, **kwargs):
    """Makes links to a notebook links to its page."""
    return re.sub(r"\]\(([^)]+)\.ipynb\)", r"](\1.md)", markdown)


def on_post_page(output, **kwargs):
    """Keeps Material from asking GitHub for the repository's stars."""
    return output.replace('data-md-component="source"', "")


def render_notebook(notebook, stem):
    """The Markdown of a notebook with its outputs, without what it printed to stderr, and its pictures by name."""
    blocks, pictures = [], {}
    for cell in notebook["cells"]:
        source, text = "".join(cell["source"]), ""
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                name = f"{stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(png))
                blocks.append(f"![Output]({name})")
            elif output.get("name") == "stdout":
                text += "".join(output["text"])
        if text:
            blocks.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(blocks) + "\n", pictures
