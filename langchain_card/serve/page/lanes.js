// The two lanes of the timeline: when target and draft were at work, as the events of an answer tell.

export const WINDOW = 12; // seconds that are shown
const LEAST = 0.04; // seconds of a block; shorter ones are put together
const WIDTH = 1000, HEIGHT = 100, GAP = 2; // of the drawing, in its own units

/** One lane, of the seconds that a model has worked since the first token; one that is hidden shows when it does. */
class Lane {
  constructor(svg) {
    this.path = svg.querySelector("path");
    this.share = svg.nextElementSibling;
    this.clear();
  }

  clear() {
    this.blocks = []; // [begin, end, share of the time between them]
    this.drawn = 0;
    this.show(0, 0);
  }

  /** A step counts when it ends: what does not fit into this block goes into the next. */
  add(begin, end, busy) {
    const filled = Math.min(Math.max(busy - this.drawn, 0), end - begin);
    this.drawn += filled;
    this.blocks.push([begin, end, filled / (end - begin)]);
    while (this.blocks[0][1] < end - WINDOW) this.blocks.shift();
    this.show(busy, end);
  }

  show(busy, seconds) {
    if (busy > 0) this.path.closest(".lane").hidden = false;
    const start = Math.max(0, seconds - WINDOW);
    this.path.setAttribute("d", this.blocks.map((block) => shape(block, start)).join(""));
    this.share.textContent = seconds > 0 ? `${Math.round(100 * Math.min(1, busy / seconds))} %` : "";
  }
}

function shape([begin, end, share], start) {
  if (share === 0) return "";
  const [left, right] = [begin, end].map((time) => ((time - start) / WINDOW) * WIDTH);
  const gap = Math.min(GAP, (right - left) / 4);
  const number = (value) => value.toFixed(1);
  return `M${number(left)} ${HEIGHT}V${number(HEIGHT * (1 - share))}H${number(right - gap)}V${HEIGHT}Z`;
}

/** Both lanes; each is an <svg> with a <path>, and an element for its share behind it. */
export class Lanes {
  #end = 0;

  constructor(target, draft) {
    this.target = new Lane(target);
    this.draft = new Lane(draft);
  }

  clear() {
    this.#end = 0;
    this.target.clear();
    this.draft.clear();
  }

  /** Takes the `stats` of an event; those of one pass come at almost the same time and make one block. */
  add(stats) {
    if (stats.seconds - this.#end < LEAST) return;
    this.target.add(this.#end, stats.seconds, stats.target_busy_seconds);
    this.draft.add(this.#end, stats.seconds, stats.draft_busy_seconds);
    this.#end = stats.seconds;
  }
}
