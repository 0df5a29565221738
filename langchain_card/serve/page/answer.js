// An answer as it is written: tokens tinted by who proposed them, fenced code in blocks. All of it is text, never HTML.

const FENCE = /^[ \t]*```/;

/** Makes an element of a class, with a text. */
export function element(tag, name, text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

/** One answer; `element` shows it, `text` is what it says so far. */
export class Answer {
  #thoughts = null;
  #block; // takes the next token
  #line = []; // [span, text] of the line that is written
  #inCode = false;
  #inFence = false;
  #reading = null; // shows how much of a long prompt was read

  constructor() {
    this.text = "";
    this.element = element("article", "answer");
    this.element.setAttribute("aria-label", "Answer");
    this.#block = this.#add(element("div", "prose"));
  }

  get isEmpty() {
    return !this.text && !this.#thoughts;
  }

  /** Shows how much of a long prompt was read, until the answer begins; `read` and `total` are tokens. */
  read({ read, total }) {
    if (!this.#reading) {
      this.#reading = this.element.appendChild(element("label", "reading"));
      this.#reading.append(element("span", ""), element("progress", ""));
    }
    const [words, bar] = this.#reading.children;
    words.textContent = `Reading ${total.toLocaleString("en")} tokens`;
    bar.max = total;
    bar.value = read;
  }

  /** Adds what the model thinks before it answers. */
  think(text, source) {
    this.endReading();
    if (!this.#thoughts) {
      const details = element("details", "thoughts");
      this.#thoughts = element("div", "prose");
      details.append(element("summary", "", "Thoughts"), this.#thoughts);
      this.element.prepend(details);
    }
    this.#thoughts.append(span(text, source, true));
  }

  /** Adds the text of a token; `source` is the drafter that had proposed it, or "". */
  write(text, source) {
    this.endReading();
    this.text += text;
    text.split(/(?<=\n)/).forEach((part, number) => this.#write(part, source, number === 0));
  }

  /** Adds a line of small print. */
  note(text) {
    this.endReading();
    this.element.append(element("p", "note", text));
  }

  endReading() {
    this.#reading?.remove();
    this.#reading = null;
  }

  #write(part, source, begins) {
    const token = span(part, source, begins);
    this.#block.append(token);
    this.#line.push([token, part]);
    if (!this.#inFence && FENCE.test(this.#line.map(([, text]) => text).join(""))) this.#openFence();
    if (this.#inFence) this.#line.forEach(([each, text]) => (each.textContent = text.replace(/[`\n]/g, "")));
    if (!part.endsWith("\n")) return;
    this.#line = [];
    if (this.#inFence) this.#closeFence();
  }

  /** The line that is written becomes the fence in front of, or behind, a block of code. */
  #openFence() {
    const code = this.#inCode ? this.#block.parentElement : this.#add(element("div", "code"));
    this.#block = code.appendChild(element("div", "fence"));
    this.#block.append(...this.#line.map(([each]) => each));
    this.#inFence = true;
  }

  #closeFence() {
    this.#inFence = false;
    this.#inCode = !this.#inCode;
    const code = this.#block.parentElement;
    this.#block = this.#inCode ? element("pre", "") : this.#add(element("div", "prose"));
    if (this.#inCode) code.append(...copiers(this.#block), this.#block);
  }

  #add(block) {
    return this.element.appendChild(block);
  }
}

/** A button that copies what a block says, where the browser lets the page do so. */
function copiers(block) {
  if (!navigator.clipboard) return [];
  const copy = element("button", "copy", "Copy");
  copy.addEventListener("click", async () => {
    const done = await navigator.clipboard.writeText(block.textContent).then(() => true, () => false);
    copy.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  return [copy];
}

/** A token, or a part of one; `begins` marks its first part, so that tokens can be counted. */
function span(text, source, begins) {
  const made = element("span", begins ? "token" : "", text);
  if (source) made.dataset.source = source;
  return made;
}
