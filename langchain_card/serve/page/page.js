// The page: a conversation, and how its last answer is written.

import { Answer, element } from "./answer.js";
import { Lanes } from "./lanes.js";
import { Problem, completion, hasKey, keepKey, modelName } from "./stream.js";

const at = (id) => document.getElementById(id);
const log = at("log"), prompt = at("prompt"), welcome = at("welcome");
const lanes = new Lanes(at("target"), at("draft"));
const UNKNOWN = "–";

let model = "";
let turns = []; // the conversation, as the next request tells it
let running = null; // the AbortController of the answer that is written
let failed = null; // the answer that an error ended, and that may be asked for again

// An answer.

async function ask() {
  const answer = new Answer(), start = performance.now();
  const stopping = (running = new AbortController());
  let last = { stats: null, usage: null, reason: "" };
  begin(answer);
  try {
    await meet();
    for await (const event of completion(body(), stopping.signal)) last = take(event, answer, last, start);
    finish(answer, last, last.reason === "length" ? "Cut off at the most tokens that were allowed" : "");
  } catch (error) {
    if (running !== stopping) return; // there is a new chat
    if (stopping.signal.aborted) finish(answer, last, "Stopped");
    else fail(answer, error);
  }
  rest();
}

async function meet() {
  model ||= await modelName();
  at("model").textContent = at("model").title = model;
}

function body() {
  const said = { model, messages: turns, stream: true, stream_options: { include_usage: true }, card: true };
  if (at("temperature").value) said.temperature = at("temperature").valueAsNumber;
  if (at("max-tokens").value) said.max_tokens = at("max-tokens").valueAsNumber;
  if (at("schedule").value) said.schedule = at("schedule").value;
  return said;
}

function begin(answer) {
  log.append(answer.element);
  log.setAttribute("aria-busy", "true");
  lanes.clear();
  for (const id of ["speed", "hits", "length", "first", "ran"]) at(id).textContent = UNKNOWN;
  at("meter").hidden = false;
  at("send").textContent = "Stop";
  say("Answering.");
  follow(true);
}

function take(event, answer, { stats, usage, reason }, start) {
  if (event.card?.reading) {
    answer.read(event.card.reading);
    follow();
    return { stats, usage, reason };
  }
  const [choice] = event.choices;
  const [token] = event.card?.tokens ?? [];
  const { content = "", reasoning_content: thought = "" } = choice?.delta ?? {};
  if (token && at("first").textContent === UNKNOWN)
    at("first").textContent = `${((performance.now() - start) / 1000).toFixed(2)} s`;
  if (thought) answer.think(thought, token?.source);
  if (content || (token && !thought)) answer.write(content, token?.source);
  for (const each of at("legend").children) if (each.dataset.source === token?.source) each.hidden = false;
  if (event.card) show(event.card.stats);
  follow();
  return { stats: event.card?.stats ?? stats, usage: event.usage ?? usage, reason: choice?.finish_reason ?? reason };
}

function show(stats) {
  at("speed").textContent = speed(stats);
  at("hits").textContent = `${Math.round(100 * stats.hit_rate)} %`;
  at("length").textContent = stats.mean_accepted_length.toFixed(1);
  at("ran").textContent = stats.schedule;
  at("lossy").hidden = !stats.lossy;
  at("rescued").textContent = stats.rescued ?? "";
  lanes.add(stats);
}

function speed({ output_tokens: tokens, seconds }) {
  return tokens > 1 && seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) : UNKNOWN;
}

function finish(answer, { stats, usage }, remark) {
  keep(answer);
  if (answer.isEmpty && remark) answer.element.remove();
  const words = remark ? [remark] : [];
  if (stats) {
    if (stats.lossy) words.push(`lossy: ${stats.rescued} tokens are not the model's own choice`);
    words.push(`${stats.accepted} of ${stats.output_tokens} tokens drafted`, `${speed(stats)} tokens/s`);
  }
  const known = usage?.prompt_tokens_details.cached_tokens;
  if (usage) words.push(`prompt of ${usage.prompt_tokens} tokens${known ? `, ${known} read before` : ""}`);
  answer.note(words.join(" · "));
  say(`${remark || "The answer is complete"}.`);
}

function fail(answer, error) {
  const known = error instanceof Problem;
  if (!known) console.error(error);
  const problem = element("div", "problem"), again = element("button", "", "Try again");
  problem.setAttribute("role", "alert");
  problem.append(element("p", "", known ? error.message : "The page failed; the console tells why."), again);
  again.addEventListener("click", retry);
  answer.endReading();
  answer.element.append(problem);
  failed = answer;
  if (!answer.text) giveBack();
  say("The answer failed.");
  if (error.status === 401) askForKey().then((given) => given && failed === answer && retry());
}

/** What was said is told with the next request; a question to which nothing was said is not. */
function keep(answer) {
  if (answer.text) turns.push({ role: "assistant", content: answer.text });
  else {
    giveBack();
    turns.pop();
    [...log.querySelectorAll(".question")].at(-1).append(element("p", "unanswered", "Not answered"));
  }
}

/** The last question can be mended and sent again, unless there is another one in the box. */
function giveBack() {
  if (prompt.value.trim()) return;
  prompt.value = turns.at(-1).content;
  fit();
}

function rest() {
  running = null;
  log.setAttribute("aria-busy", "false");
  at("send").textContent = "Send";
  follow();
}

// What the reader does.

function send() {
  const content = prompt.value.trim();
  if (!content || running) return;
  settle();
  welcome.remove();
  turns.push({ role: "user", content });
  const turn = element("article", "question", content);
  turn.setAttribute("aria-label", "You");
  log.append(turn);
  prompt.value = "";
  fit();
  ask();
}

function retry() {
  failed.element.remove();
  failed = null;
  if (prompt.value.trim() === turns.at(-1).content) prompt.value = "";
  fit();
  prompt.focus();
  ask();
}

/** An answer that failed stays as far as it came, and is not asked for again. */
function settle() {
  if (!failed) return;
  failed.element.querySelector(".problem button").remove();
  keep(failed);
  failed = null;
}

function beginAnew() {
  running?.abort();
  failed = null;
  turns = [];
  log.replaceChildren(welcome);
  at("meter").hidden = true;
  say("A new chat.");
  rest();
  prompt.focus();
}

async function open() {
  try {
    await meet();
  } catch (error) {
    if (error.status === 401 && (await askForKey())) await open();
  }
}

/** Whether one was given. */
function askForKey() {
  const dialog = at("keys"), wrong = hasKey() ? "The one that was given is not one of its keys. " : "";
  at("keys-why").textContent = `${wrong}It is kept until this tab is closed.`;
  at("key").value = dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function say(text) {
  at("status").textContent = text;
}

// The end of the conversation stays in sight, unless the reader has left it.

let following = true, scrolled = 0, due = false;

function follow(always = false) {
  following ||= always;
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    if (following) log.scrollTop = log.scrollHeight;
  });
}

log.addEventListener("scroll", () => {
  const left = log.scrollHeight - log.clientHeight - log.scrollTop;
  if (log.scrollTop < scrolled && left > 4) following = false;
  else if (log.scrollTop > scrolled && left < log.clientHeight / 4) following = true;
  scrolled = log.scrollTop;
});

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send();
});
at("new").addEventListener("click", beginAnew);
at("tint").addEventListener("change", (event) => log.classList.toggle("plain", !event.target.checked));
at("keys").querySelector("form").addEventListener("submit", () => keepKey(at("key").value.trim()));
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  const popovers = CSS.supports("selector(:popover-open)"); // older browsers throw at the selector
  const closing = at("keys").open || (popovers && at("settings").matches(":popover-open"));
  if (event.key === "Escape" && !closing) running?.abort();
});
new ResizeObserver(() => follow()).observe(log);
open();
