// Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
// The page: a language model that writes, or a vision model that classifies, run by ONNX Runtime in the browser.
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

const $ = (id) => document.getElementById(id);
const number = (x) => Math.round(x).toLocaleString("en");
const bytes = (x) => `${number(x)} bytes`;
const local = (name) => new URL(name, import.meta.url).href;
const say = (sentence) => { $("status").textContent = sentence; };

ort.env.wasm.numThreads = 1; // more need headers that static hosts do not send
ort.env.wasm.wasmPaths = { wasm: local("vendor/ort-wasm-simd-threaded.wasm") };
ort.env.logLevel = "error";

async function readJson(name) {
  const answer = await fetch(local(name));
  if (!answer.ok) throw new Error(`${name} is missing from this page's folder (${answer.status}).`);
  return answer.json();
}

function element(tag, fields = {}, ...children) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
}

/** A row of a bar chart: what, how much of it, and its share in figures. */
function bar(what, share, color) {
  const line = element("i");
  line.style.width = `${100 * share}%`;
  if (color) line.style.setProperty("--head", color);
  return element("li", {}, element("span", { textContent: what }), element("span", {}, line),
    element("b", { textContent: `${(100 * share).toFixed(1)} %` }));
}

function fillLayers(select, count, redraw) {
  for (let layer = 1; layer <= count; layer++) select.append(new Option(layer, layer - 1));
  select.value = count - 1;
  select.addEventListener("change", redraw);
}

// Language ----------------------------------------------------------------------------------------------------------

/** The model with its state, the only thing it knows of the tokens before. */
class Reader {
  constructor(session, facts) {
    Object.assign(this, { session, facts });
    this.reset();
  }

  reset() {
    this.seen = 0;
    this.state = {};
    for (const { input, shape } of this.facts.states) {
      const size = shape.reduce((product, side) => product * side, 1);
      this.state[input] = new ort.Tensor("float32", new Float32Array(size), shape);
    }
  }

  get stateBytes() {
    return Object.values(this.state).reduce((sum, tensor) => sum + tensor.data.byteLength, 0);
  }

  /** Reads a token; gives the logits of the next one, and this one's memberships (layers, heads). */
  async read(id) {
    const feeds = {
      input_ids: new ort.Tensor("int64", BigInt64Array.of(BigInt(id)), [1, 1]),
      position: new ort.Tensor("int64", BigInt64Array.of(BigInt(this.seen)), [1]),
      ...this.state,
    };
    const results = await this.session.run(feeds);
    this.state = Object.fromEntries(this.facts.states.map(({ input, output }) => [input, results[output]]));
    this.seen += 1;
    return { logits: results.logits.data, memberships: results.memberships.data };
  }
}

/** The next token: the likeliest at temperature 0, else drawn at random. */
function choose(logits, temperature) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (!(temperature > 0)) return best;
  const weights = Float64Array.from(logits, (x) => Math.exp((x - logits[best]) / temperature));
  let rest = Math.random() * weights.reduce((sum, weight) => sum + weight, 0);
  return Math.max(weights.findIndex((weight) => (rest -= weight) < 0), 0);
}

/** Turns tokens into the pieces of text they stand for; "" for a token that ends amid a character. */
class Pieces {
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

/** The text as coloured tokens, one of which may be chosen. */
class Text {
  constructor(facts) {
    Object.assign(this, { facts, box: $("text"), tokens: [], chosen: -1 });
    fillLayers($("layer"), facts.layers, () => this.recolor());
    this.box.addEventListener("click", (event) => this.choose(this.tokens.findIndex((t) => t.span === event.target)));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.clear();
  }

  clear() {
    this.box.replaceChildren();
    this.tokens = [];
    this.largest = new Float32Array(this.facts.layers).fill(1e-6);
    this.choose(-1);
  }

  /** @param shares memberships of the token in the heads, (layers, heads) */
  add(id, piece, shares, given) {
    const span = element("span", { textContent: piece, className: given ? "given" : "" });
    span.dataset.id = id;
    const token = { span, piece, shares };
    const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    this.tokens.push(token);
    for (let layer = 0; layer < this.facts.layers; layer++) {
      this.largest[layer] = Math.max(this.largest[layer], this.strongest(token, layer).above);
    }
    this.paint(token);
    this.box.append(span);
    if (atEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  strongest({ shares }, layer) {
    const { heads } = this.facts;
    let head = 0;
    for (let h = 1; h < heads; h++) if (shares[layer * heads + h] > shares[layer * heads + head]) head = h;
    return { head, above: Math.max(shares[layer * heads + head] - 1 / heads, 0) };
  }

  paint(token) {
    const layer = Number($("layer").value);
    const { head, above } = this.strongest(token, layer);
    const { color, mark } = this.facts.colors[head];
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

  key(event) {
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
    const { heads, colors } = this.facts;
    const { head } = this.strongest(token, layer);
    $("token").textContent = `Token ${index + 1}, “${token.piece}”: most of it in head ${head + 1} of layer ${layer + 1}`;
    for (let h = 0; h < heads; h++) {
      $("shares").append(bar(`Head ${h + 1}`, token.shares[layer * heads + h], colors[h].color));
    }
  }
}

/** What the user does with a language model. */
class Writing {
  constructor(session, tokenizer, facts) {
    Object.assign(this, { facts, tokenizer, reader: new Reader(session, facts), text: new Text(facts), running: false });
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
    say("Ready.");
  }

  async start() {
    if (this.running) return;
    const ids = this.tokenizer.encode($("prompt").value).ids;
    if (!ids.length && this.facts.bos !== null) ids.push(this.facts.bos);
    const { positions } = this.facts;
    if (!ids.length) return say("Type a few words first.");
    if (positions !== null && ids.length >= positions) {
      return say(`This text has ${number(ids.length)} tokens; the model reads up to ${number(positions - 1)}. Shorten it.`);
    }
    this.reader.reset();
    this.text.clear();
    this.pieces = new Pieces(this.tokenizer);
    let read = 0;
    await this.guard(async () => {
      for (; read < ids.length && this.running; read++) await this.read(ids[read], true);
    });
    if (read >= ids.length) await this.write();
  }

  async write() {
    if (this.running || !this.logits) return;
    const count = Math.max(Number($("count").value) || 0, 0);
    const temperature = Number($("temperature").value) || 0;
    const { positions, eos } = this.facts;
    const began = performance.now();
    let written = 0, end = "";
    await this.guard(async () => {
      while (this.running && written < count) {
        if (positions !== null && this.reader.seen >= positions) {
          end = ` That is the model's last position (${number(positions)}).`;
          break;
        }
        const id = choose(this.logits, temperature);
        await this.read(id, false);
        written += 1;
        $("speed").textContent = (1000 * written / (performance.now() - began)).toFixed(1);
        if (eos.includes(id)) {
          end = " The model ended its text.";
          break;
        }
      }
      say(`Wrote ${number(written)} tokens.${end}`);
    });
  }

  /** Reads a token, shows it and what it left, and gives the browser time to draw. */
  async read(id, given) {
    const { logits, memberships } = await this.reader.read(id);
    this.logits = logits;
    this.text.add(id, this.pieces.next(id), memberships, given);
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
    $("softmax").textContent = bytes(2 * 4 * this.facts.layers * this.facts.width * seen); // keys and values in float32
  }

  async guard(run) {
    this.running = true;
    this.buttons();
    say("Writing …");
    try {
      await run();
    } catch (error) {
      this.logits = null;
      say(`The model stopped: ${error.message}`);
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

// Start -------------------------------------------------------------------------------------------------------------

async function main() {
  const facts = await readJson("space.json");
  document.title = $("title").textContent = facts.title;
  $("about").textContent = facts.about;
  const session = await ort.InferenceSession.create(local(facts.graph), { executionProviders: ["wasm"] });
  if (facts.kind === "language") {
    const { Tokenizer } = await import("./vendor/tokenizers.min.mjs");
    const files = await Promise.all(["tokenizer.json", "tokenizer_config.json"].map(readJson));
    new Writing(session, new Tokenizer(...files), facts);
  }
}

main().catch((error) => say(`This page does not work: ${error.message}`));
