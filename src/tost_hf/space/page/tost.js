// Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
// The page: text generation or image classification by ONNX Runtime in the browser.
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

const $ = (id) => document.getElementById(id);
const formatNumber = (x) => Math.round(x).toLocaleString("en");
const formatPercent = (x) => `${(100 * x).toFixed(1)}\u00a0%`;
const formatBytes = (x) => {
  if (x < 1000) return `${x}\u00a0bytes`;
  const [size, unit] = x < 999500 ? [x / 1e3, "KB"] : [x / 1e6, "MB"];
  return `${size < 100 ? size.toPrecision(3) : formatNumber(size)}\u00a0${unit}`;
};
const resolveUrl = (name) => new URL(name, import.meta.url).href;
const setStatus = (text) => { $("status").textContent = text; };

ort.env.wasm.numThreads = 1; // more threads need headers that static hosts do not send
ort.env.wasm.wasmPaths = { wasm: resolveUrl("vendor/ort-wasm-simd-threaded.wasm") };
ort.env.logLevel = "error";

const PREFILL_CHUNK_SIZE = 64;
const MIN_PATCHES = 8, ENLARGED_PATCHES = 32; // rows and columns: with fewer a map shows little; of an enlarged image

async function readJson(name) {
  const response = await fetch(resolveUrl(name));
  if (!response.ok) throw new Error(`${name} is missing from this page's folder (${response.status}).`);
  return response.json();
}

function createElement(tag, fields = {}, ...children) {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...children);
  return node;
}

/** An item of a bar chart: a label, a bar, and the percentage. */
function createBar(label, fraction, color) {
  const bar = createElement("i");
  bar.style.width = `${100 * fraction}%`;
  if (color) bar.style.setProperty("--head", color);
  return createElement("li", {}, createElement("span", { textContent: label }), createElement("span", {}, bar),
    createElement("b", { textContent: formatPercent(fraction) }));
}

/** Adds an option for each layer of the model, counted from 0; its value is the position in the list. */
function addLayerOptions(select, layers, selected, redraw) {
  layers.forEach((layer, i) => select.append(new Option(layer, i)));
  select.value = selected;
  select.addEventListener("change", redraw);
}

// Language ----------------------------------------------------------------------------------------------------------

/** The model and its state. */
class StatefulModel {
  constructor(session, metadata) {
    Object.assign(this, { session, metadata });
    this.inputShapes = Object.fromEntries(metadata.inputs.map(({ name, shape }) => [name, shape]));
    this.reset();
  }

  reset() {
    this.length = 0;
    this.state = {};
    for (const { input, shape } of this.metadata.state) {
      const dims = shape.map((dim) => ({ batch: 1, cached: 0 })[dim] ?? dim);
      const size = dims.reduce((product, dim) => product * dim, 1);
      this.state[input] = new ort.Tensor("float32", new Float32Array(size), dims);
    }
  }

  /** The bytes of the state: of constant size, and of keys and values, which grow in layers of softmax attention. */
  get stateBytes() {
    const bytes = { constant: 0, growing: 0 };
    for (const { input, shape } of this.metadata.state) {
      bytes[shape.includes("cached") ? "growing" : "constant"] += this.state[input].data.byteLength;
    }
    return bytes;
  }

  /** Processes tokens; returns the logits of the next token and the memberships (layers, heads, tokens) of the tokens. */
  async forward(ids) {
    const masksCachedTokens = this.inputShapes.attention_mask.includes("cached+tokens"); // with attention layers
    const values = {
      input_ids: ids,
      attention_mask: Array(ids.length + (masksCachedTokens ? this.length : 0)).fill(1),
      position_ids: ids.map((_, i) => this.length + i),
    };
    const feeds = { ...this.state };
    for (const name of Object.keys(values).filter((name) => name in this.inputShapes)) {
      feeds[name] = new ort.Tensor("int64", BigInt64Array.from(values[name], BigInt), [1, values[name].length]);
    }
    const results = await this.session.run(feeds);
    this.state = Object.fromEntries(this.metadata.state.map(({ input, output }) => [input, results[output]]));
    this.length += ids.length;
    const logits = results.logits.data;
    return { logits: logits.subarray(logits.length - this.metadata.vocab_size), memberships: results.memberships.data };
  }
}

/** The most probable token at temperature 0, otherwise a sampled one. */
function sampleToken(logits, temperature) {
  let argmax = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[argmax]) argmax = i;
  if (!(temperature > 0)) return argmax;
  const weights = Float64Array.from(logits, (x) => Math.exp((x - logits[argmax]) / temperature));
  let remaining = Math.random() * weights.reduce((sum, weight) => sum + weight, 0);
  return Math.max(weights.findIndex((weight) => (remaining -= weight) < 0), 0);
}

/** Decodes tokens one by one; returns "" for a token that ends within a character. */
class TokenDecoder {
  constructor(tokenizer) {
    Object.assign(this, { tokenizer, prefixIds: [], pendingIds: [] });
  }

  next(id) {
    this.pendingIds.push(id);
    const prefix = this.decode(this.prefixIds);
    const string = this.decode([...this.prefixIds, ...this.pendingIds]).slice(prefix.length);
    if (string.endsWith("\ufffd") && this.pendingIds.length < 4) return "";
    this.prefixIds = this.pendingIds;
    this.pendingIds = [];
    return string;
  }

  decode(ids) {
    const options = { skip_special_tokens: false, clean_up_tokenization_spaces: false };
    return ids.length ? this.tokenizer.decode(ids, options) : "";
  }
}

/** The text as colored tokens, of which the user can select one. */
class TokenView {
  constructor(metadata) {
    Object.assign(this, { metadata, box: $("text"), tokens: [], selected: -1 });
    addLayerOptions($("layer"), metadata.statistics_layers, metadata.statistics_layers.length - 1, () => this.recolor());
    this.box.addEventListener("click", (event) => this.select(this.tokens.findIndex((t) => t.span === event.target)));
    this.box.addEventListener("keydown", (event) => this.handleKey(event));
    this.clear();
  }

  clear() {
    this.box.replaceChildren();
    this.tokens = [];
    this.maxExcess = new Float32Array(this.metadata.statistics_layers.length).fill(1e-6);
    this.select(-1);
  }

  /** @param memberships of the token, (layers, heads) */
  add(id, string, memberships, isPrompt) {
    const span = createElement("span", { textContent: string, className: isPrompt ? "prompt-token" : "" });
    span.dataset.id = id;
    const token = { span, string, memberships };
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    this.tokens.push(token);
    for (let layer = 0; layer < this.maxExcess.length; layer++) {
      this.maxExcess[layer] = Math.max(this.maxExcess[layer], this.findStrongestHead(token, layer).excess);
    }
    this.paint(token);
    this.box.append(span);
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  /** The head with the largest membership, and by how much it exceeds the mean over the heads. */
  findStrongestHead({ memberships }, layer) {
    const heads = this.metadata.heads.length;
    let head = 0;
    for (let h = 1; h < heads; h++) if (memberships[layer * heads + h] > memberships[layer * heads + head]) head = h;
    return { head, excess: Math.max(memberships[layer * heads + head] - 1 / heads, 0) };
  }

  paint(token) {
    const layer = Number($("layer").value);
    const { head, excess } = this.findStrongestHead(token, layer);
    const { color, mark } = this.metadata.heads[head];
    token.span.style.setProperty("--head", color);
    token.span.style.setProperty("--excess", excess.toFixed(6));
    token.span.classList.remove("mark1", "mark2");
    if (mark) token.span.classList.add(`mark${mark}`);
    this.box.style.setProperty("--max-excess", this.maxExcess[layer].toFixed(6));
  }

  recolor() {
    for (const token of this.tokens) this.paint(token);
    this.select(this.selected);
  }

  handleKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !this.tokens.length) return;
    event.preventDefault();
    this.select(Math.min(Math.max(this.selected + steps[event.key], 0), this.tokens.length - 1));
    this.tokens[this.selected].span.scrollIntoView({ block: "nearest" });
  }

  select(index) {
    this.tokens[this.selected]?.span.classList.remove("selected");
    this.selected = index;
    const token = this.tokens[index];
    $("memberships").replaceChildren();
    $("token").textContent = "A token's membership in the heads";
    if (!token) return;
    token.span.classList.add("selected");
    const layer = Number($("layer").value);
    const { heads, statistics_layers: layers } = this.metadata;
    const { head } = this.findStrongestHead(token, layer);
    const strongestHead = `strongest head ${head} of layer ${layers[layer]}`;
    $("token").textContent = `Token ${index + 1}, “${token.string}”: ${strongestHead}`;
    heads.forEach(({ color }, h) => {
      $("memberships").append(createBar(`Head ${h}`, token.memberships[layer * heads.length + h], color));
    });
  }
}

/** The controls of a language model. */
class LanguagePage {
  constructor(session, tokenizer, metadata) {
    const model = new StatefulModel(session, metadata);
    Object.assign(this, { metadata, tokenizer, model, tokenView: new TokenView(metadata), running: false });
    $("language").hidden = false;
    $("prompt").value = metadata.prompt;
    $("ask").addEventListener("submit", (event) => { event.preventDefault(); this.start(); });
    $("more").addEventListener("click", () => this.generate());
    $("stop").addEventListener("click", () => { this.running = false; });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running = false;
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.start();
    });
    this.showState();
    this.updateButtons();
    setStatus("Ready.");
  }

  async start() {
    if (this.running) return;
    const ids = this.tokenizer.encode($("prompt").value).ids;
    const { bos_token_id: bos, max_position_embeddings: positions } = this.metadata;
    if (!ids.length && bos !== null) ids.push(bos);
    if (!ids.length) return setStatus("Type a few words first.");
    if (positions !== null && ids.length >= positions) {
      const limit = formatNumber(positions - 1);
      return setStatus(`This prompt has ${formatNumber(ids.length)} tokens; the model accepts up to ${limit}. Shorten it.`);
    }
    this.model.reset();
    this.tokenView.clear();
    this.decoder = new TokenDecoder(this.tokenizer);
    let position = 0;
    await this.run(async () => {
      for (; position < ids.length && this.running; position += PREFILL_CHUNK_SIZE) {
        await this.forward(ids.slice(position, position + PREFILL_CHUNK_SIZE), true);
      }
    });
    if (position >= ids.length) await this.generate();
  }

  async generate() {
    if (this.running || !this.logits) return;
    const maxNewTokens = Math.max(Number($("count").value) || 0, 0);
    const temperature = Number($("temperature").value) || 0;
    const { max_position_embeddings: positions, eos_token_id: eos } = this.metadata;
    const startTime = performance.now();
    let numNewTokens = 0, stopReason = "";
    await this.run(async () => {
      while (this.running && numNewTokens < maxNewTokens) {
        if (positions !== null && this.model.length >= positions) {
          stopReason = ` That is the model's last position (${formatNumber(positions)}).`;
          break;
        }
        const id = sampleToken(this.logits, temperature);
        await this.forward([id], false);
        numNewTokens += 1;
        $("speed").textContent = (1000 * numNewTokens / (performance.now() - startTime)).toFixed(1);
        if ([eos].flat().includes(id)) {
          stopReason = " The model generated an end-of-sequence token.";
          break;
        }
      }
      setStatus(`Generated ${formatNumber(numNewTokens)} tokens.${stopReason}`);
    });
  }

  /** Processes tokens, shows them and the state, and lets the browser draw. */
  async forward(ids, isPrompt) {
    const { logits, memberships } = await this.model.forward(ids);
    this.logits = logits;
    const size = memberships.length / ids.length; // layers times heads
    ids.forEach((id, t) => {
      const tokenMemberships = Float32Array.from({ length: size }, (_, i) => memberships[i * ids.length + t]);
      this.tokenView.add(id, this.decoder.next(id), tokenMemberships, isPrompt);
    });
    this.showState();
    if (performance.now() - (this.drawTime ?? 0) > 30) {
      await new Promise((resolve) => setTimeout(resolve));
      this.drawTime = performance.now();
    }
  }

  showState() {
    const { length, stateBytes } = this.model;
    const { depth, width } = this.metadata;
    const { constant, growing } = stateBytes;
    const grows = this.metadata.state.some(({ shape }) => shape.includes("cached"));
    $("state").textContent = `${formatBytes(constant + growing)}, ${grows ? "growing" : "constant"}`;
    $("growth").hidden = !grows;
    $("growth").textContent = `Of the state, ${formatBytes(constant)} in the TSSA layers are constant; ` +
      `${formatBytes(growing)} are keys and values of the attention layers, which grow.`;
    $("tokens").textContent = formatNumber(length);
    $("softmax").textContent = formatBytes(2 * 4 * depth * width * length); // keys and values in float32
  }

  /** Runs an asynchronous function, with the buttons and the status for generation. */
  async run(callback) {
    this.running = true;
    this.updateButtons();
    setStatus("Generating …");
    try {
      await callback();
    } catch (error) {
      this.logits = null;
      setStatus(`The model stopped: ${error.message}`);
    } finally {
      this.running = false;
      this.updateButtons();
    }
  }

  updateButtons() {
    $("write").disabled = this.running;
    $("more").disabled = this.running || !this.logits;
    $("stop").disabled = !this.running;
  }
}

// Vision ------------------------------------------------------------------------------------------------------------

const FILTERS = { // support and function of Pillow's filters
  bilinear: [1, (x) => Math.max(1 - Math.abs(x), 0)],
  bicubic: [2, (x) => {
    const d = Math.abs(x);
    if (d < 1) return (1.5 * d - 2.5) * d * d + 1;
    return d < 2 ? ((-0.5 * d + 2.5) * d - 4) * d + 2 : 0;
  }],
};

/** For each pixel of a resized line: the index of its first source pixel, and the weights of its source pixels. */
function computeFilterWeights(size, newSize, [support, filter]) {
  const scale = size / newSize;
  const filterScale = Math.max(scale, 1);
  return Array.from({ length: newSize }, (_, i) => {
    const center = (i + 0.5) * scale;
    const start = Math.max(Math.trunc(center - support * filterScale + 0.5), 0);
    const end = Math.min(Math.trunc(center + support * filterScale + 0.5), size);
    const weights = Array.from({ length: end - start }, (_, k) => filter((k + start - center + 0.5) / filterScale));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return [start, weights.map((weight) => weight / sum)];
  });
}

/** Resizes one dimension; pixels are RGBA bytes, `step` pixels apart within a line, lines `stride` pixels apart. */
function resizeLines(pixels, numLines, stride, step, filterWeights, newStride, newStep) {
  const resized = new Uint8ClampedArray(4 * numLines * filterWeights.length); // rounds its elements
  for (let line = 0; line < numLines; line++) {
    filterWeights.forEach(([start, weights], i) => {
      for (let channel = 0; channel < 4; channel++) {
        let sum = 0;
        for (let k = 0; k < weights.length; k++) {
          sum += weights[k] * pixels[4 * (line * stride + (start + k) * step) + channel];
        }
        resized[4 * (line * newStride + i * newStep) + channel] = sum;
      }
    });
  }
  return resized;
}

/** Resizes with Pillow's algorithm, which differs from that of a canvas. */
function resize({ data, width, height }, newWidth, newHeight, filter) {
  if (newWidth !== width) {
    data = resizeLines(data, height, width, 1, computeFilterWeights(width, newWidth, filter), newWidth, 1);
  }
  if (newHeight !== height) {
    data = resizeLines(data, newWidth, 1, newWidth, computeFilterWeights(height, newHeight, filter), 1, newWidth);
  }
  return new ImageData(data, newWidth, newHeight);
}

/** Resizes and center-crops an image for the model. */
function preprocess(image, { shortest_edge, resized, filter, height, width }) {
  let size = resized;
  if (!size) {
    const longestEdge = Math.trunc(shortest_edge * Math.max(image.width, image.height) / Math.min(image.width, image.height));
    size = image.height <= image.width ? [shortest_edge, longestEdge] : [longestEdge, shortest_edge];
  }
  const resizedImage = resize(image, size[1], size[0], FILTERS[filter]);
  const canvas = createElement("canvas", { width, height });
  const [left, top] = [(size[1] - width) >> 1, (size[0] - height) >> 1];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillRect(0, 0, width, height); // black outside the image
  context.putImageData(resizedImage, -left, -top);
  return context.getImageData(0, 0, width, height);
}

/** The viridis color of a value from 0 to 1, interpolated between five colors. */
function viridis(value) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const position = Math.min(Math.max(value, 0), 1) * (stops.length - 1);
  const index = Math.min(Math.trunc(position), stops.length - 2);
  return stops[index].map((from, i) => from + (position - index) * (stops[index + 1][i] - from));
}

/** The controls of a vision model. */
class VisionPage {
  constructor(session, metadata) {
    Object.assign(this, { session, metadata });
    $("vision").hidden = false;
    $("file").disabled = false;
    $("membership").hidden = !metadata.outputs.some(({ name }) => name === "memberships");
    const { depth, labels, samples } = metadata;
    addLayerOptions($("depth"), [...Array(depth).keys()], (depth - 1) >> 1, () => this.showMaps());
    if (labels.length <= 20) $("labels").textContent = `The model knows ${labels.length} classes: ${labels.join(", ")}.`;
    $("samples").append(...samples.map((name) => {
      const button = createElement("button", { type: "button", title: name },
        createElement("img", { src: resolveUrl(`samples/${name}`), alt: name.split(".")[0] }));
      button.addEventListener("click", () => this.openSample(name));
      return button;
    }));
    $("file").addEventListener("change", () => this.openFile($("file").files[0]));
    addEventListener("paste", (event) => this.openFile(event.clipboardData.files[0]));
    for (const type of ["dragover", "dragleave", "drop"]) {
      addEventListener(type, (event) => {
        event.preventDefault();
        $("drop").classList.toggle("over", type === "dragover");
        if (type === "drop") this.openFile(event.dataTransfer.files[0]);
      });
    }
    setStatus("Ready.");
  }

  async openSample(name) {
    const response = await fetch(resolveUrl(`samples/${name}`));
    await this.openFile(new File([await response.blob()], name));
  }

  async openFile(file) {
    if (!file) return;
    setStatus("Classifying …");
    try {
      await this.classify(await this.decodeImage(file));
      setStatus(`${file.name}: ${this.metadata.labels[this.bestLabel]}`);
    } catch (error) {
      setStatus(`${file.name} cannot be classified: ${error.message}`);
    }
  }

  async decodeImage(file) {
    let bitmap;
    try {
      bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
    } catch {
      throw new Error("it is not an image that this browser can read.");
    }
    const canvas = createElement("canvas", { width: bitmap.width, height: bitmap.height });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, bitmap.width, bitmap.height);
  }

  async classify(image) {
    const { height, width } = this.metadata.image;
    await new Promise((resolve) => setTimeout(resolve)); // time to draw the status
    const { modelImage, results } = await this.run(image, 1);
    $("results").hidden = false;
    Object.assign($("image"), { width, height });
    $("image").getContext("2d").putImageData(modelImage, 0, 0);
    this.showClasses(results.logits.data);
    if (!results.memberships) return;
    const grid = Math.min(height, width) / this.metadata.patch_size;
    const scale = grid < MIN_PATCHES ? Math.ceil(ENLARGED_PATCHES / grid) : 1;
    this.maps = scale === 1 ? { modelImage, results } : await this.run(image, scale);
    $("note").textContent = "The memberships of a patch add up to 1; equal ones would be " +
      `${formatPercent(1 / this.metadata.heads.length)}. Bright is the maximum of a head, dark the minimum.`;
    if (scale > 1) {
      $("note").textContent += ` The model classifies ${height} × ${width} pixels, too few patches for a map; ` +
        `these are of the image at ${scale * height} × ${scale * width} pixels.`;
    }
    this.showMaps();
  }

  /** Runs the model on an image at `scale` times the size that it classifies. */
  async run(image, scale) {
    const { shortest_edge, resized, height, width, scale: factor, mean, std } = this.metadata.image;
    const [newHeight, newWidth] = [scale * height, scale * width];
    const modelImage = preprocess(image, {
      ...this.metadata.image,
      shortest_edge: scale * shortest_edge,
      resized: resized?.map((side) => scale * side),
      height: newHeight,
      width: newWidth,
    });
    const size = newHeight * newWidth;
    const values = new Float32Array(3 * size);
    for (let i = 0; i < size; i++) {
      for (let c = 0; c < 3; c++) values[c * size + i] = (modelImage.data[4 * i + c] * factor - mean[c]) / std[c];
    }
    const pixels = new ort.Tensor("float32", values, [1, 3, newHeight, newWidth]);
    return { modelImage, results: await this.session.run({ pixel_values: pixels }) };
  }

  showClasses(logits) {
    const maxLogit = Math.max(...logits);
    const weights = Array.from(logits, (x) => Math.exp(x - maxLogit));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a]);
    this.bestLabel = order[0];
    $("classes").replaceChildren(...order.slice(0, 5).map((i) => createBar(this.metadata.labels[i], weights[i] / sum)));
  }

  showMaps() {
    if (!this.maps) return;
    const { modelImage, results } = this.maps;
    const { patch_size: patch, heads: { length: heads } } = this.metadata;
    const layer = Number($("depth").value);
    const [gridHeight, gridWidth] = [modelImage.height / patch, modelImage.width / patch];
    const size = gridHeight * gridWidth;
    const figures = Array.from({ length: heads }, (_, head) => {
      const map = results.memberships.data.subarray((layer * heads + head) * size, (layer * heads + head + 1) * size);
      const min = Math.min(...map), max = Math.max(...map);
      const pixels = new ImageData(gridWidth, gridHeight);
      map.forEach((value, i) => pixels.data.set([...viridis((value - min) / Math.max(max - min, 1e-12)), 255], 4 * i));
      const caption = `Head ${head}: ${formatPercent(min)} to ${formatPercent(max)}`;
      return createFigure(pixels, caption, `${caption} of a patch, in layer ${layer}`);
    });
    $("maps").replaceChildren(createFigure(modelImage, "The image", "The image"), ...figures);
  }
}

function createFigure(pixels, caption, ariaLabel) {
  const canvas = createElement("canvas", { width: pixels.width, height: pixels.height, role: "img", ariaLabel });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return createElement("figure", {}, canvas, createElement("figcaption", { textContent: caption }));
}

// Start -------------------------------------------------------------------------------------------------------------

async function main() {
  const metadata = { ...await readJson("model/export.json"), ...await readJson("space.json") };
  document.title = $("title").textContent = metadata.title;
  $("about").textContent = metadata.about;
  const session = await ort.InferenceSession.create(resolveUrl(`model/${metadata.model}`), { executionProviders: ["wasm"] });
  if (metadata.kind === "language") {
    const { Tokenizer } = await import("./vendor/tokenizers.min.mjs");
    const files = await Promise.all(["model/tokenizer.json", "model/tokenizer_config.json"].map(readJson));
    new LanguagePage(session, new Tokenizer(...files), metadata);
  } else {
    new VisionPage(session, metadata);
  }
}

main().catch((error) => setStatus(`This page does not work: ${error.message}`));
