// Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
// The page: text generation or image classification by ONNX Runtime in the browser.
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

const $ = (id) => document.getElementById(id);
const number = (x) => Math.round(x).toLocaleString("en");
const percent = (x) => `${(100 * x).toFixed(1)}\u00a0%`;
const bytes = (x) => `${number(x)} bytes`;
const local = (name) => new URL(name, import.meta.url).href;
const setStatus = (text) => { $("status").textContent = text; };

ort.env.wasm.numThreads = 1; // more need headers that static hosts do not send
ort.env.wasm.wasmPaths = { wasm: local("vendor/ort-wasm-simd-threaded.wasm") };
ort.env.logLevel = "error";

async function readJson(name) {
  const answer = await fetch(local(name));
  if (!answer.ok) throw new Error(`${name} is missing from this page's folder (${answer.status}).`);
  return answer.json();
}

function element(tag, fields = {}, ...children) {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...children);
  return node;
}

/** An item of a bar chart: its label, a bar, and the percentage. */
function bar(label, share, color) {
  const line = element("i");
  line.style.width = `${100 * share}%`;
  if (color) line.style.setProperty("--head", color);
  return element("li", {}, element("span", { textContent: label }), element("span", {}, line),
    element("b", { textContent: percent(share) }));
}

/** Options for the layers with these numbers from 0; the value is the index in the list. */
function fillLayers(select, numbers, redraw) {
  numbers.forEach((layer, i) => select.append(new Option(layer + 1, i)));
  select.value = numbers.length - 1;
  select.addEventListener("change", redraw);
}

// Language ----------------------------------------------------------------------------------------------------------

/** The model and its state after the tokens so far. */
class StatefulModel {
  constructor(session, facts) {
    Object.assign(this, { session, facts });
    this.inputs = Object.fromEntries(facts.inputs.map(({ name, shape }) => [name, shape]));
    this.reset();
  }

  reset() {
    this.seen = 0;
    this.state = {};
    for (const { input, shape } of this.facts.state) {
      const sides = shape.map((side) => ({ batch: 1, cached: 0 })[side] ?? side);
      const size = sides.reduce((product, side) => product * side, 1);
      this.state[input] = new ort.Tensor("float32", new Float32Array(size), sides);
    }
  }

  get stateBytes() {
    return Object.values(this.state).reduce((sum, tensor) => sum + tensor.data.byteLength, 0);
  }

  /** Reads tokens; returns the logits of the next one, and the memberships (layers, heads, tokens) of these. */
  async read(ids) {
    const hasCachedTokens = this.inputs.attention_mask.includes("cached+tokens"); // softmax attention masks them, too
    const values = {
      input_ids: ids,
      attention_mask: Array(ids.length + (hasCachedTokens ? this.seen : 0)).fill(1),
      position_ids: ids.map((_, i) => this.seen + i),
    };
    const feeds = { ...this.state };
    for (const name of Object.keys(values).filter((name) => name in this.inputs)) {
      feeds[name] = new ort.Tensor("int64", BigInt64Array.from(values[name], BigInt), [1, values[name].length]);
    }
    const results = await this.session.run(feeds);
    this.state = Object.fromEntries(this.facts.state.map(({ input, output }) => [input, results[output]]));
    this.seen += ids.length;
    const logits = results.logits.data;
    return { logits: logits.subarray(logits.length - this.facts.vocab_size), memberships: results.memberships.data };
  }
}

/** The next token: the most probable one at temperature 0, else sampled. */
function sampleToken(logits, temperature) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (!(temperature > 0)) return best;
  const weights = Float64Array.from(logits, (x) => Math.exp((x - logits[best]) / temperature));
  let rest = Math.random() * weights.reduce((sum, weight) => sum + weight, 0);
  return Math.max(weights.findIndex((weight) => (rest -= weight) < 0), 0);
}

/** Decodes tokens one by one; "" for a token that ends within a character. */
class TokenDecoder {
  constructor(tokenizer) {
    Object.assign(this, { tokenizer, before: [], open: [] });
  }

  next(id) {
    this.open.push(id);
    const start = this.decode(this.before);
    const piece = this.decode([...this.before, ...this.open]).slice(start.length);
    if (piece.endsWith("\ufffd") && this.open.length < 4) return "";
    this.before = this.open;
    this.open = [];
    return piece;
  }

  decode(ids) {
    const options = { skip_special_tokens: false, clean_up_tokenization_spaces: false };
    return ids.length ? this.tokenizer.decode(ids, options) : "";
  }
}

/** The text as coloured tokens, one of which may be selected. */
class TokenView {
  constructor(facts) {
    Object.assign(this, { facts, box: $("text"), tokens: [], chosen: -1 });
    fillLayers($("layer"), facts.statistics_layers, () => this.recolor());
    this.box.addEventListener("click", (event) => this.choose(this.tokens.findIndex((t) => t.span === event.target)));
    this.box.addEventListener("keydown", (event) => this.handleKey(event));
    this.clear();
  }

  clear() {
    this.box.replaceChildren();
    this.tokens = [];
    this.largest = new Float32Array(this.facts.statistics_layers.length).fill(1e-6);
    this.choose(-1);
  }

  /** @param shares memberships of the token in the heads, (layers, heads) */
  add(id, piece, shares, given) {
    const span = element("span", { textContent: piece, className: given ? "given" : "" });
    span.dataset.id = id;
    const token = { span, piece, shares };
    const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    this.tokens.push(token);
    for (let layer = 0; layer < this.largest.length; layer++) {
      this.largest[layer] = Math.max(this.largest[layer], this.strongest(token, layer).above);
    }
    this.paint(token);
    this.box.append(span);
    if (atEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  strongest({ shares }, layer) {
    const heads = this.facts.heads.length;
    let head = 0;
    for (let h = 1; h < heads; h++) if (shares[layer * heads + h] > shares[layer * heads + head]) head = h;
    return { head, above: Math.max(shares[layer * heads + head] - 1 / heads, 0) };
  }

  paint(token) {
    const layer = Number($("layer").value);
    const { head, above } = this.strongest(token, layer);
    const { color, mark } = this.facts.heads[head];
    token.span.style.setProperty("--head", color);
    token.span.style.setProperty("--above", above.toFixed(6));
    token.span.classList.remove("mark1", "mark2");
    if (mark) token.span.classList.add(`mark${mark}`);
    this.box.style.setProperty("--largest", this.largest[layer].toFixed(6));
  }

  recolor() {
    for (const token of this.tokens) this.paint(token);
    this.choose(this.chosen);
  }

  handleKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !this.tokens.length) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.chosen + steps[event.key], 0), this.tokens.length - 1));
    this.tokens[this.chosen].span.scrollIntoView({ block: "nearest" });
  }

  choose(index) {
    this.tokens[this.chosen]?.span.classList.remove("chosen");
    this.chosen = index;
    const token = this.tokens[index];
    $("shares").replaceChildren();
    $("token").textContent = "A token's membership in the heads";
    if (!token) return;
    token.span.classList.add("chosen");
    const layer = Number($("layer").value);
    const { heads, statistics_layers: layers } = this.facts;
    const { head } = this.strongest(token, layer);
    $("token").textContent = `Token ${index + 1}, “${token.piece}”: strongest head ${head + 1} of layer ${layers[layer] + 1}`;
    heads.forEach(({ color }, h) => {
      $("shares").append(bar(`Head ${h + 1}`, token.shares[layer * heads.length + h], color));
    });
  }
}

/** The controls of a language model. */
class LanguagePage {
  constructor(session, tokenizer, facts) {
    Object.assign(this, { facts, tokenizer, reader: new StatefulModel(session, facts), text: new TokenView(facts), running: false });
    $("language").hidden = false;
    $("ask").addEventListener("submit", (event) => { event.preventDefault(); this.start(); });
    $("more").addEventListener("click", () => this.write());
    $("stop").addEventListener("click", () => { this.running = false; });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running = false;
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.start();
    });
    this.show();
    this.buttons();
    setStatus("Ready.");
  }

  async start() {
    if (this.running) return;
    const ids = this.tokenizer.encode($("prompt").value).ids;
    const { bos_token_id: bos, max_position_embeddings: positions } = this.facts;
    if (!ids.length && bos !== null) ids.push(bos);
    if (!ids.length) return setStatus("Type a few words first.");
    if (positions !== null && ids.length >= positions) {
      return setStatus(`This text has ${number(ids.length)} tokens; the model reads up to ${number(positions - 1)}. Shorten it.`);
    }
    this.reader.reset();
    this.text.clear();
    this.pieces = new TokenDecoder(this.tokenizer);
    let read = 0;
    await this.guard(async () => {
      for (; read < ids.length && this.running; read += 64) await this.read(ids.slice(read, read + 64), true);
    });
    if (read >= ids.length) await this.write();
  }

  async write() {
    if (this.running || !this.logits) return;
    const count = Math.max(Number($("count").value) || 0, 0);
    const temperature = Number($("temperature").value) || 0;
    const { max_position_embeddings: positions, eos_token_id: end } = this.facts;
    const began = performance.now();
    let written = 0, why = "";
    await this.guard(async () => {
      while (this.running && written < count) {
        if (positions !== null && this.reader.seen >= positions) {
          why = ` That is the model's last position (${number(positions)}).`;
          break;
        }
        const id = sampleToken(this.logits, temperature);
        await this.read([id], false);
        written += 1;
        $("speed").textContent = (1000 * written / (performance.now() - began)).toFixed(1);
        if ([end].flat().includes(id)) {
          why = " The model ended its text.";
          break;
        }
      }
      setStatus(`Generated ${number(written)} tokens.${why}`);
    });
  }

  /** Reads tokens, shows them and the state, and gives the browser time to draw. */
  async read(ids, given) {
    const { logits, memberships } = await this.reader.read(ids);
    this.logits = logits;
    const size = memberships.length / ids.length; // layers times heads
    ids.forEach((id, t) => {
      const shares = Float32Array.from({ length: size }, (_, i) => memberships[i * ids.length + t]);
      this.text.add(id, this.pieces.next(id), shares, given);
    });
    this.show();
    if (performance.now() - (this.drawn ?? 0) > 30) {
      await new Promise((resolve) => setTimeout(resolve));
      this.drawn = performance.now();
    }
  }

  show() {
    const { seen, stateBytes } = this.reader;
    $("state").textContent = bytes(stateBytes);
    $("tokens").textContent = number(seen);
    $("softmax").textContent = bytes(2 * 4 * this.facts.depth * this.facts.width * seen); // keys and values in float32
  }

  async guard(run) {
    this.running = true;
    this.buttons();
    setStatus("Generating …");
    try {
      await run();
    } catch (error) {
      this.logits = null;
      setStatus(`The model stopped: ${error.message}`);
    } finally {
      this.running = false;
      this.buttons();
    }
  }

  buttons() {
    $("write").disabled = this.running;
    $("more").disabled = this.running || !this.logits;
    $("stop").disabled = !this.running;
  }
}

// Vision ------------------------------------------------------------------------------------------------------------

const FILTERS = { // of Pillow, with their supports
  bilinear: [1, (x) => Math.max(1 - Math.abs(x), 0)],
  bicubic: [2, (x) => {
    const d = Math.abs(x);
    if (d < 1) return (1.5 * d - 2.5) * d * d + 1;
    return d < 2 ? ((-0.5 * d + 2.5) * d - 4) * d + 2 : 0;
  }],
};

/** For each pixel of a resized line: the first of its source pixels, and their weights. */
function weights(before, after, [support, filter]) {
  const scale = before / after;
  const wide = Math.max(scale, 1);
  return Array.from({ length: after }, (_, i) => {
    const center = (i + 0.5) * scale;
    const first = Math.max(Math.trunc(center - support * wide + 0.5), 0);
    const last = Math.min(Math.trunc(center + support * wide + 0.5), before);
    const found = Array.from({ length: last - first }, (_, k) => filter((k + first - center + 0.5) / wide));
    const sum = found.reduce((total, weight) => total + weight, 0);
    return [first, found.map((weight) => weight / sum)];
  });
}

/** Resizes along one side; pixels are RGBA bytes, `step` apart on a line, lines `stride` apart. */
function resizeLines(pixels, lines, stride, step, taps, newStride, newStep) {
  const resized = new Uint8ClampedArray(4 * lines * taps.length); // which rounds
  for (let line = 0; line < lines; line++) {
    taps.forEach(([first, found], i) => {
      for (let channel = 0; channel < 4; channel++) {
        let sum = 0;
        for (let k = 0; k < found.length; k++) sum += found[k] * pixels[4 * (line * stride + (first + k) * step) + channel];
        resized[4 * (line * newStride + i * newStep) + channel] = sum;
      }
    });
  }
  return resized;
}

/** Resizes as Pillow does, unlike a canvas. */
function resize({ data, width, height }, newWidth, newHeight, filter) {
  if (newWidth !== width) {
    data = resizeLines(data, height, width, 1, weights(width, newWidth, filter), newWidth, 1);
  }
  if (newHeight !== height) {
    data = resizeLines(data, newWidth, 1, newWidth, weights(height, newHeight, filter), 1, newWidth);
  }
  return new ImageData(data, newWidth, newHeight);
}

/** The picture as the model sees it: resized and center-cropped. */
function prepare(picture, { shortest_edge, resized, filter, height, width }) {
  let sides = resized;
  if (!sides) {
    const { width: w, height: h } = picture;
    const long = Math.trunc(shortest_edge * Math.max(w, h) / Math.min(w, h));
    sides = h <= w ? [shortest_edge, long] : [long, shortest_edge];
  }
  const resizedPicture = resize(picture, sides[1], sides[0], FILTERS[filter]);
  const canvas = element("canvas", { width, height });
  const [left, top] = [(sides[1] - width) >> 1, (sides[0] - height) >> 1];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillRect(0, 0, width, height); // black outside the picture
  context.putImageData(resizedPicture, -left, -top);
  return context.getImageData(0, 0, width, height);
}

/** The viridis colour of a share from 0 to 1, interpolated between five colours. */
function viridis(share) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const below = Math.min(Math.trunc(place), stops.length - 2);
  return stops[below].map((from, i) => from + (place - below) * (stops[below + 1][i] - from));
}

/** The controls of a vision model. */
class VisionPage {
  constructor(session, facts) {
    Object.assign(this, { session, facts });
    $("vision").hidden = false;
    $("file").disabled = false;
    this.maps = facts.outputs.some(({ name }) => name === "memberships");
    $("membership").hidden = !this.maps;
    fillLayers($("depth"), [...Array(facts.depth).keys()], () => this.showMaps());
    $("file").addEventListener("change", () => this.openFile($("file").files[0]));
    addEventListener("paste", (event) => this.openFile(event.clipboardData.files[0]));
    for (const kind of ["dragover", "dragleave", "drop"]) {
      addEventListener(kind, (event) => {
        event.preventDefault();
        $("drop").classList.toggle("over", kind === "dragover");
        if (kind === "drop") this.openFile(event.dataTransfer.files[0]);
      });
    }
    setStatus("Ready.");
  }

  async openFile(file) {
    if (!file) return;
    setStatus("Classifying …");
    try {
      await this.classify(await this.decodeImage(file));
      setStatus(`${file.name}: ${this.facts.labels[this.best]}`);
    } catch (error) {
      setStatus(`${file.name} cannot be classified: ${error.message}`);
    }
  }

  async decodeImage(file) {
    let bitmap;
    try {
      bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
    } catch {
      throw new Error("it is not a picture that this browser can read.");
    }
    const canvas = element("canvas", { width: bitmap.width, height: bitmap.height });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, bitmap.width, bitmap.height);
  }

  async classify(picture) {
    const { height, width, scale, mean, std } = this.facts.image;
    const seen = prepare(picture, this.facts.image);
    const values = new Float32Array(3 * height * width);
    for (let i = 0; i < height * width; i++) {
      for (let c = 0; c < 3; c++) values[c * height * width + i] = (seen.data[4 * i + c] * scale - mean[c]) / std[c];
    }
    await new Promise((resolve) => setTimeout(resolve)); // time to draw the status
    const results = await this.session.run({ pixel_values: new ort.Tensor("float32", values, [1, 3, height, width]) });
    this.memberships = results.memberships?.data;
    $("found").hidden = false;
    Object.assign($("seen"), { width, height });
    $("seen").getContext("2d").putImageData(seen, 0, 0);
    this.showClasses(results.logits.data);
    if (this.memberships) this.showMaps();
  }

  showClasses(logits) {
    const largest = Math.max(...logits);
    const odds = Array.from(logits, (x) => Math.exp(x - largest));
    const sum = odds.reduce((total, x) => total + x, 0);
    const order = [...odds.keys()].sort((a, b) => odds[b] - odds[a]);
    this.best = order[0];
    $("classes").replaceChildren(...order.slice(0, 5).map((i) => bar(this.facts.labels[i], odds[i] / sum)));
  }

  showMaps() {
    if (!this.memberships) return;
    const { image: { height, width }, patch_size: patch, heads: { length: heads } } = this.facts;
    const layer = Number($("depth").value);
    const [gridHeight, gridWidth] = [height / patch, width / patch];
    const size = gridHeight * gridWidth;
    const shares = this.memberships.subarray(layer * heads * size, (layer + 1) * heads * size);
    const low = shares.reduce((a, b) => Math.min(a, b)), high = shares.reduce((a, b) => Math.max(a, b));
    $("maps").replaceChildren(...Array.from({ length: heads }, (_, head) => {
      const map = shares.subarray(head * size, (head + 1) * size);
      const image = new ImageData(gridWidth, gridHeight);
      map.forEach((share, i) => image.data.set([...viridis((share - low) / Math.max(high - low, 1e-12)), 255], 4 * i));
      const canvas = element("canvas", { width: gridWidth, height: gridHeight, role: "img" });
      canvas.getContext("2d").putImageData(image, 0, 0);
      const caption = `Head ${head + 1}: ${percent(Math.min(...map))} to ${percent(Math.max(...map))}`;
      canvas.ariaLabel = `${caption} of a patch, in layer ${layer + 1}`;
      return element("figure", {}, canvas, element("figcaption", { textContent: caption }));
    }));
  }
}

// Start -------------------------------------------------------------------------------------------------------------

async function main() {
  const facts = { ...await readJson("model/export.json"), ...await readJson("space.json") };
  document.title = $("title").textContent = facts.title;
  $("about").textContent = facts.about;
  const session = await ort.InferenceSession.create(local(`model/${facts.model}`), { executionProviders: ["wasm"] });
  if (facts.kind === "language") {
    const { Tokenizer } = await import("./vendor/tokenizers.min.mjs");
    const files = await Promise.all(["model/tokenizer.json", "model/tokenizer_config.json"].map(readJson));
    new LanguagePage(session, new Tokenizer(...files), facts);
  } else {
    new VisionPage(session, facts);
  }
}

main().catch((error) => setStatus(`This page does not work: ${error.message}`));
