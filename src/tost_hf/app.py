# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""`tost-hf app`: a page to try a model and to look into it, by Gradio."""

import html
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import StoppingCriteriaList, TextIteratorStreamer, pipeline

from .extras import require
from .hub.loading import display_name, load_config, load_with_processor, resolve_model_folder
from .hub.results import load_metadata
from .image_processing import open_image
from .interpret import compression_terms, half_life, membership_maps, plots, token_decay, trace_model
from .interpret.inspection import MAX_TOKENS, plot_class_attention, prepare_image, prepare_text
from .interpret.trace import ModelTrace, tssa_layers
from .model.cache_tost import ToSTCache
from .model.modeling_tost import ToSTForSequenceClassification
from .model.modeling_tost_vision import ToSTForImageClassification


if TYPE_CHECKING:
    from gradio import Blocks
    from matplotlib.figure import Figure

PHOTOS = Path(__file__).with_name("photos")
PROMPT = "Once upon a time"
TOP_K = 5  # classes to show
MAX_NEW_TOKENS = 1000
UPDATE_SECONDS = 0.05  # between texts sent to the browser: a phone cannot draw hundreds a second, and could not press Stop
ENLARGED_PATCHES = 32  # rows or columns
COMPRESSION_TITLE = "Compression by layer: the term that the layers lower (R), and the coding rate that it bounds"
CSS = """
.tokens { --most: 0.65; white-space: pre-wrap; line-height: 1.9; overflow-wrap: anywhere }
.dark .tokens { --most: 0.4 }
.tokens span { padding: 0.1em 0 0.2em;
  background: color-mix(in srgb, var(--head) calc(100% * (0.08 + var(--most) * var(--lead))), transparent) }
"""
UNDERLINES = ("none", "1px solid", "3px double")  # by the mark of a head, as hatches in pictures


def launch_app(model: str | os.PathLike, *, title: str | None = None, revision: str | None = None, **options: Any) -> "Blocks":
    """Opens the page of a model, on loopback unless `server_name` or the variable GRADIO_SERVER_NAME says otherwise.

    ```python
    launch_app("./tost-demo", server_port=7860)
    ```

    Args:
        model, title, revision: as in `make_app`.
        options: of Gradio's `Blocks.launch`, such as `server_port` or `prevent_thread_lock`.

    Returns:
        The page, whose `close()` stops it.
    """
    page = make_app(model, title=title, revision=revision)
    page.launch(show_error=True, css=CSS, ssr_mode=False, allowed_paths=[str(PHOTOS)], **options)
    return page


def make_app(model: str | os.PathLike, *, title: str | None = None, revision: str | None = None) -> "Blocks":
    """Makes the page of a model: what it predicts, and how its tokens or patches belong to its heads.

    A causal language model writes, a classifier classifies, and any model with TSSA layers shows its memberships. The model is
    loaded once. Requests wait for each other, in a queue, and errors are shown as messages.

    Args:
        model: a folder or a repository of the Hub, with its tokenizer if it reads texts. A vision model without an image
            processor uses `make_image_processor`.
        title: title of the page; by default the model's name.
        revision: branch, tag or commit of the repository.

    Returns:
        Gradio's `Blocks`, to `launch`.

    Raises:
        ValueError: the model, its tokenizer or its image processor cannot be loaded, or a tokenizer is missing.
        OSError: there is no such model.
        ImportError: Gradio, matplotlib or Pillow is missing.
    """
    for package in ("gradio", "matplotlib", "PIL"):
        require(package, "app")
    import gradio as gr

    folder = resolve_model_folder(model, revision)
    config = load_config(folder)
    loaded_model, processor = load_with_processor(folder, config)
    loaded_model = cast(Any, loaded_model).float().to("cuda" if torch.cuda.is_available() else "cpu")
    title = title or display_name(model)
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(f"# {title}\n{type(loaded_model).__name__}, {loaded_model.num_parameters():,} parameters")
        if config.model_type == "tost_vision":
            _add_image_page(loaded_model, processor)
        else:
            _add_text_page(loaded_model, processor, _find_prompts(folder))
        gr.Markdown("ToST, the [Token Statistics Transformer](https://arxiv.org/abs/2412.17810)")
    return page


def _find_prompts(folder: Path) -> list[str]:
    """The examples of the model card (`widget`), by default one of our own."""
    widget = load_metadata(folder).get("widget") or ()
    texts = [example["text"] for example in widget if isinstance(example, dict) and isinstance(example.get("text"), str)]
    return texts or [PROMPT]


class _Page:
    """What the pages of texts and images have in common: one model, which answers one request at a time.

    The lock is needed beside Gradio's queue, as `trace_model` would also record what the model computes in another thread.
    """

    def __init__(self, model: Any):
        self.model = model
        self.lock = Lock()
        self.endpoints: set[str] = set()
        try:
            self.layers = list(tssa_layers(model))
        except ValueError:  # the baselines have none
            self.layers = []

    def on(self, listen: Callable, function: Callable, inputs: list, outputs: list) -> Any:
        """Adds an event listener to the queue. The first one of a function is also an endpoint for `gradio_client`."""
        name = function.__name__
        options = {"api_name": name, "api_visibility": "private" if name in self.endpoints else "public"}
        self.endpoints.add(name)
        return listen(function, inputs, outputs, concurrency_id="model", concurrency_limit=1, **options)

    def classify(self, run: Callable, input: Any) -> dict[str, float] | str:
        """The scores of a pipeline of transformers: a dict of probabilities, or a text for a model of numbers."""
        with self.lock:
            scores = run(input, top_k=TOP_K)
        if self.model.config.problem_type == "regression":
            return "\n".join(f"{entry['label']}: {entry['score']:.4g}" for entry in scores)
        return {entry["label"]: entry["score"] for entry in scores}

    def trace(self, **inputs: torch.Tensor) -> ModelTrace:
        with self.lock:
            return trace_model(self.model, **inputs)


def _plot_compression(trace: ModelTrace) -> "Figure":
    return plots.plot_compression({"tokens": compression_terms(trace)}, trace.layers)


def _add_figures(titles: list[str]) -> list[Any]:
    import gradio as gr

    figures = []
    for title in titles:
        gr.Markdown(f"### {title}")  # a label would hide a part of the figure
        figures.append(gr.Plot(show_label=False))
    return figures


# Images -----------------------------------------------------------------------------------------------------------------


def _add_image_page(model: Any, processor: Any) -> None:
    import gradio as gr

    page, config = _Page(model), model.config
    is_classifier = isinstance(model, ToSTForImageClassification)
    run: Any = pipeline("image-classification", model=model, image_processor=processor) if is_classifier else None

    def classify(file: str | None) -> dict[str, float] | str | None:
        if file is None:
            return None
        image = open_image(file)  # transformers would convert to RGB for a model of gray images, too
        return page.classify(run, image if config.num_channels == 3 else np.asarray(image.convert("L"))[None])

    def look(file: str | None, layer: int, enlarge: bool) -> list[Any]:
        if file is None:
            return ["", *(None for _ in figures)]
        image_size = ENLARGED_PATCHES * config.patch_size if enlarge else None
        pixel_values, picture = prepare_image(model, processor, open_image(file), image_size)
        trace = page.trace(pixel_values=pixel_values)
        i = trace.layers.index(layer)
        maps = membership_maps(trace)[0, i : i + 1]
        limit = plots.scale_limit(trace.memberships, 1 / trace.memberships.shape[2])
        drawn = [
            plots.plot_membership_maps(maps, picture, [layer], limit=limit, heads_per_line=4),
            plots.plot_strongest_heads(maps, picture, [layer]),
            _plot_compression(trace),
        ]
        if trace.class_attentions is not None:
            drawn.append(plot_class_attention(trace, picture, heads_per_line=4))
        height, width = pixel_values.shape[-2:]
        return [f"Layer {layer}, of {height} x {width} pixels in {maps.shape[-2]} x {maps.shape[-1]} patches", *drawn]

    with gr.Row():
        sources: Any = ["upload", "webcam", "clipboard"]
        file = gr.Image(type="filepath", image_mode=None, label="Image", height=320, min_width=300, sources=sources)
        label = gr.Label(label="Class", num_top_classes=TOP_K, min_width=300, visible=is_classifier)
    gr.Examples([[str(photo)] for photo in sorted(PHOTOS.glob("*.jpg"))], file, label="Examples")
    changed: Any = None
    if is_classifier:
        changed = page.on(file.change, classify, [file], [label])
    if page.layers:
        layer = gr.Radio(page.layers, value=page.layers[-1], label="Layer")
        info = "Finer maps of a larger image; with more patches memberships are closer to uniform"
        enlarge = gr.Checkbox(label=f"{ENLARGED_PATCHES} patches a side", info=info)
        note = gr.Markdown()
        titles = ["Memberships of the patches in the heads", "Strongest head, pale where it barely leads", COMPRESSION_TITLE]
        if is_classifier:
            titles.append("Attention of the class token, by class-attention layer and head")
        figures = _add_figures(titles)
        inputs, outputs = [file, layer, enlarge], [note, *figures]
        page.on(changed.then if changed else file.change, look, inputs, outputs)
        for setting in (layer, enlarge):
            page.on(setting.input, look, inputs, outputs)


# Texts ------------------------------------------------------------------------------------------------------------------


def _add_text_page(model: Any, tokenizer: Any, prompts: list[str]) -> None:
    import gradio as gr

    page, config = _Page(model), model.config
    is_classifier = isinstance(model, ToSTForSequenceClassification)
    task: Any = "text-generation" if model.can_generate() else "text-classification" if is_classifier else None
    run: Any = task and pipeline(task, model=model, tokenizer=tokenizer)

    def classify(text: str) -> dict[str, float] | str:
        return page.classify(run, text)

    def write(prompt: str, temperature: float, tokens: int) -> Iterator[tuple[str, str]]:
        yield from _generate(page, run, prompt, temperature, int(tokens))

    def look(text: str, layer: int) -> list[Any]:
        input_ids, _ = prepare_text(model, tokenizer, text)
        if not input_ids.numel():
            return ["", *(None for _ in figures)]
        trace = page.trace(input_ids=input_ids)
        i = trace.layers.index(layer)
        drawn = [_plot_compression(trace)]
        if trace.log_decay is not None:
            drawn.append(plots.plot_decay(token_decay(trace)[0, i : i + 1], half_life(trace)[0, i : i + 1], [layer]))
        pieces = _split_text(tokenizer, input_ids[0].tolist())
        return [_color_tokens(pieces, membership_maps(trace)[0, i]), *drawn]

    text = gr.Textbox(prompts[0], label="Prompt" if model.can_generate() else "Text", lines=3)
    if len(prompts) > 1:
        gr.Examples([[prompt] for prompt in prompts], text, label="Examples")
    shown: Any = text
    events: list[Any] = []  # after which the heads are shown
    if model.can_generate():
        settings = model.generation_config
        default = (1.0 if settings.temperature is None else settings.temperature) if settings.do_sample else 0.0
        with gr.Row():
            temperature = gr.Slider(0, 2, default, step=0.05, label="Temperature (0: greedy)", min_width=300)
            tokens = gr.Slider(1, MAX_NEW_TOKENS, 100, step=1, label="New tokens", min_width=300)
        with gr.Row():
            start, more, stop = gr.Button("Write", variant="primary"), gr.Button("Continue"), gr.Button("Stop")
        shown, state = gr.Textbox(label="Text", lines=6, interactive=False), gr.Markdown()
        events.append(page.on(start.click, write, [text, temperature, tokens], [shown, state]))
        events.append(page.on(more.click, write, [shown, temperature, tokens], [shown, state]))
        stop.click(None, cancels=events)
    else:
        start = gr.Button("Classify" if is_classifier else "Read", variant="primary")
    if is_classifier:
        events.append(page.on(start.click, classify, [text], [gr.Label(label="Class", num_top_classes=TOP_K)]))
    if page.layers:
        layer = gr.Radio(page.layers, value=page.layers[-1], label="Layer")
        gr.Markdown(f"Strongest head of each token (of the first {MAX_TOKENS}), pale where it barely leads:")
        colored = gr.HTML()
        titles = [COMPRESSION_TITLE]
        if config.decay_type != "none":
            titles.append("Decay: what remains of each head's sums at each token, and tokens after which half remains")
        figures = _add_figures(titles)
        for listen in (*([event.then for event in events] or [start.click]), layer.input):
            page.on(listen, look, [shown, layer], [colored, *figures])


def _generate(page: _Page, run: Any, prompt: str, temperature: float, tokens: int) -> Iterator[tuple[str, str]]:
    """Yields the text so far and a line on speed and state, as the model writes; closing the iterator stops it."""
    config, tokenizer = page.model.config, run.tokenizer
    num_read = len(tokenizer(prompt).input_ids)
    if config.position_embedding_type == "learned":
        if num_read >= (limit := config.max_position_embeddings):
            raise ValueError(f"The prompt has {num_read:,} tokens; the model has positions for {limit:,}. Shorten it.")
        tokens = min(tokens, limit - num_read)
    cache, stopped, results = ToSTCache(config), Event(), []
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=num_read > 0, skip_special_tokens=True)
    stop = StoppingCriteriaList([lambda input_ids, scores: torch.full((len(input_ids),), stopped.is_set())])
    options = {"max_new_tokens": tokens, "past_key_values": cache, "stopping_criteria": stop, "streamer": streamer}
    options |= {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}

    def generate() -> None:
        try:
            with page.lock:
                results.append(run(prompt, **options)[0]["generated_text"])
        except Exception as error:  # raised again by the thread that reads the text
            results.append(error)
            streamer.end()

    def describe() -> str:
        length = cache.get_seq_length()
        speed = max(length - num_read, 0) / (time.monotonic() - begin)
        state = _describe_cache(cache.layers, config, page.layers, length)
        return f"{length:,} tokens read, {speed:.0f} a second. {state}"

    thread, begin, last, text = Thread(target=generate), time.monotonic(), 0.0, prompt
    thread.start()
    try:
        for piece in streamer:
            text += piece
            if time.monotonic() - last > UPDATE_SECONDS:
                yield text, describe()
                last = time.monotonic()
        thread.join()
        if isinstance(results[0], Exception):
            raise results[0]
        yield results[0], describe()
    finally:
        stopped.set()
        thread.join()


def _describe_cache(layers: list[Any], config: Any, tssa_layers: list[int], length: int) -> str:
    """The bytes of one sequence's cache, beside those of a transformer's keys and values."""
    others = [layer for i, layer in enumerate(layers) if i not in tssa_layers and layer.is_initialized]
    text = ""
    if tssa_layers:
        text += f"State of the TSSA layers: {sum(layers[i].nbytes for i in tssa_layers):,} bytes at any length. "
    if others:
        num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in others)
        tokens = f", of {config.sliding_window - 1:,} tokens at most" if all(layer.is_sliding for layer in others) else ""
        text += f"Keys and values of the layers of softmax attention: {num_bytes:,} bytes{tokens}. "
    size = 2 * 4 * config.num_hidden_layers * config.hidden_size * length
    return text + f"Keys and values of a transformer of this size: {size:,} bytes."


def _color_tokens(pieces: list[str], memberships: torch.Tensor) -> str:
    """Tokens in the colors of their strongest heads, from memberships (H, T); pale where a head barely leads."""
    leads, strongest = plots.strongest_heads(memberships)

    def style(head: int, lead: float) -> str:
        color, mark = plots.head_style(head)
        return f'style="--head: {color}; --lead: {lead:.2f}; border-bottom: {UNDERLINES[mark]}"'

    spans = [
        f'<span {style(head, lead)} title="head {head}: {memberships[head, t]:.2f}">{html.escape(piece)}</span>'
        for t, (piece, head, lead) in enumerate(zip(pieces, strongest.tolist(), leads.tolist()))
    ]
    legend = " ".join(f"<span {style(head, 1)}>&nbsp;head {head}&nbsp;</span>" for head in range(len(memberships)))
    return f'<div class="tokens">{legend}</div><div class="tokens">{"".join(spans)}</div>'


def _split_text(tokenizer: Any, ids: list[int]) -> list[str]:
    """The part of the text that each token adds; "" for a token that ends within a character."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    pieces, text = [], ""
    for end in range(1, len(ids) + 1):
        longer_text = tokenizer.decode(ids[:end], **options)
        is_complete = not longer_text.endswith("\ufffd") or end == len(ids)
        pieces.append(longer_text[len(text) :] if is_complete else "")
        text = longer_text if is_complete else text
    return pieces
