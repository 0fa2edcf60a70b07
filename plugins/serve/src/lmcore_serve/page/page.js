// The page of `lmcore serve`: sends prompts to /v1, and shows the answers of all models as they grow.
const $ = (id) => document.getElementById(id);
const LOGPROBS = 5;
const state = { models: [], panels: [], running: null, messages: [] };

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function problem(response) {
  try {
    const { error } = await response.json();
    const full = error.code === "context_length_exceeded" && mode() === "chat";
    return full ? `${error.message}. Ask for fewer tokens, or clear the conversation.` : error.message;
  } catch {
    return `status ${response.status}`;
  }
}

function tokensIn(number) {
  return `${number} ${number === 1 ? "token" : "tokens"}`;
}

function counted(number) {
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (number >= size) return `${(number / size).toPrecision(3)}${unit}`;
  }
  return String(number);
}

// As `fetch`, with an error that says what its own means.
async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server does not answer: it has ended, or the network is down.");
  }
}

async function load() {
  const response = await ask("/v1/models", { headers: headers() });
  if (response.status === 401) {
    const wrong = $("key").value.trim() !== "";
    report(new Error(wrong ? "The API key is not known to this server." : "This server needs an API key: enter it in the settings."));
    $("settings").open = true;
    $("key-field").hidden = false;
    $("key").focus();
    return;
  }
  if (!response.ok) throw new Error(await problem(response));
  state.models = (await response.json()).data;
  $("facts").replaceChildren();
  for (const model of state.models) {
    const f = model.facts;
    // On a phone one line, which opens; elsewhere there is room for all of it.
    const line = element("details");
    line.open = !narrow.matches;
    const summary = element("summary");
    summary.append(element("b", "", model.id), ` ${f.family}, ${counted(f.parameters)} parameters`);
    line.append(summary, `${f.layers} ${f.layers === 1 ? "layer" : "layers"}, ${f.positions} positions, ` +
      `${f.tokenizer} of ${f.vocabulary.toLocaleString("en")} tokens, ${f.precision} on ${f.device}, ${f.checkpoint}`);
    $("facts").append(line);
  }
  $("modes").hidden = !state.models.every((model) => model.facts.chat);
  document.title = `${state.models.map((model) => model.id).join(" / ")} - lmcore`;
  const positions = Math.min(...state.models.map((model) => model.facts.positions));
  $("max_tokens").max = positions;
  $("max_tokens").value = Math.min($("max_tokens").value, Math.ceil(positions / 2)) || "";
  reset();
}

function mode() {
  return $("modes").hidden ? "text" : document.querySelector("input[name=mode]:checked").value;
}

function reset() {
  state.messages = state.models.map(() => []);
  state.panels = state.models.map((model) => {
    const panel = element("article", "answer");
    if (state.models.length > 1) panel.append(element("h2", "", model.id));
    const body = element("div", "body");
    const status = element("div", "status");
    status.setAttribute("role", "status");
    body.append(element("p", "empty", "The text appears here, token by token."));
    panel.append(body, status);
    return { panel, body, status };
  });
  $("answers").replaceChildren(...state.panels.map((one) => one.panel));
  hideTip();
}

function clear() {
  stop();
  reset();
}

function stop() {
  state.running?.abort();
}

function number(id) {
  const value = $(id).value.trim();
  return value === "" ? undefined : Number(value);
}

function request(index) {
  const text = $("prompt").value;
  const stopText = $("stop_text").value.replaceAll("\\n", "\n").replaceAll("\\t", "\t");
  const topK = number("top_k");
  const body = {
    model: state.models[index].id, max_tokens: number("max_tokens") ?? null, temperature: number("temperature"),
    top_p: number("top_p"), top_k: topK, min_p: number("min_p"),
    repetition_penalty: number("repetition_penalty"), seed: number("seed"),
    stop: stopText || undefined, stream: true, stream_options: { include_usage: true },
  };
  if (mode() === "text") return ["/v1/completions", { ...body, prompt: text, logprobs: LOGPROBS }];
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...state.messages[index]];
  return ["/v1/chat/completions", { ...body, messages, logprobs: true, top_logprobs: LOGPROBS }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice("data: ".length));
    }
  }
}

// Tokens of a part of either interface: {text, logprob, top: [[text, logprob], ...]}.
function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) {
    return found.content.map((one) => ({
      text: one.token, logprob: one.logprob, top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return found.tokens.map((text, at) => ({
    text, logprob: found.token_logprobs[at], top: Object.entries(found.top_logprobs[at] ?? {}),
  }));
}

// Half the tint at a tenth of the most probable token's probability.  Compared with that token, as
// all tokens of a weak model are improbable.
function tint(token) {
  const best = Math.max(token.logprob, ...token.top.map(([, logprob]) => logprob));
  return 1 - Math.exp(Math.LN2 * (token.logprob - best) / Math.LN10);
}

function show(place, text, tokens) {
  if (!text && !tokens.length) return;
  // The text of a part may lag behind its tokens within a character: the last token carries it.
  const span = element("span", "token", text);
  const last = tokens.at(-1);
  if (last) {
    span.style.setProperty("--strength", tint(last).toFixed(3));
    span.tokens = tokens;
    // Tab reaches the first token of a text, the arrow keys the others.
    span.tabIndex = place.querySelector(".token[tabindex='0']") ? -1 : 0;
  }
  place.append(span);
}

// Shows an answer as it grows; returns true if the model gave any.
async function generate(index, signal) {
  const { panel, body, status } = state.panels[index];
  const messages = state.messages[index];
  panel.setAttribute("aria-busy", "true");
  const chat = mode() === "chat";
  if (!chat || !body.querySelector(".turn")) body.replaceChildren();
  const question = chat ? turn(body, "you", $("prompt").value) : null;
  const place = turn(body, chat ? "model" : "", "");
  // An answer does not continue its prompt.
  if (!chat && !state.models[index].facts.answers) place.append(element("span", "prompt", $("prompt").value));
  const started = performance.now();
  let first = null, answer = "", usage = null, reason = null, count = 0;
  status.className = "status";
  status.textContent = "Waiting for the first token";
  try {
    const [path, content] = request(index);
    const response = await ask(path, {
      method: "POST", headers: headers(), signal, body: JSON.stringify(content),
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      for (const choice of event.choices) {
        const text = choice.text ?? choice.delta?.content ?? "";
        const tokens = tokensOf(choice);
        if (tokens.length) first ??= performance.now();
        count += tokens.length;
        answer += text;
        reason = choice.finish_reason ?? reason;
        show(place, text, tokens);
      }
      status.textContent = `Generating: ${tokensIn(count)} so far`;
    }
    const words = { stop: "Ended by the model or a stop sequence", length: "Ended at the token limit" };
    const made = usage?.completion_tokens ?? count;
    const seconds = (performance.now() - started) / 1000;
    const speed = made ? ` in ${seconds.toPrecision(3)} s (${(made / seconds).toPrecision(3)} tokens/s)` : "";
    const wait = first === null ? "" : `, the first after ${Math.round(first - started)} ms`;
    status.textContent = `Prompt: ${tokensIn(usage?.prompt_tokens ?? "?")}. ` +
      `Generated: ${tokensIn(made)}${speed}${wait}. ${words[reason] ?? "Ended"}.`;
  } catch (error) {
    if (error.name === "AbortError") {
      status.textContent = `Stopped after ${tokensIn(count)}.`;
    } else {
      status.className = "status error";
      // What the browser says of a stream that breaks differs.
      status.textContent = error instanceof TypeError ? "The server ended within the answer." : error.message;
    }
  } finally {
    panel.removeAttribute("aria-busy");
    if (chat && (answer || reason)) {
      messages.push({ role: "assistant", content: answer });
    } else if (chat) {
      messages.pop();
      for (const made of [question, place]) made.parentElement.remove();
    }
  }
  return Boolean(answer || reason);
}

function turn(body, who, text) {
  const made = element("div", "turn");
  if (who) made.append(element("div", "who", who));
  const place = element("div", "text", text);
  made.append(place);
  body.append(made);
  return place;
}

// Shows below each field of a wrong value what is wrong; returns true if none is.
function valid() {
  const wrong = [...$("form").querySelectorAll(".grid input")].filter((field) => !checked(field));
  if (wrong.length) {
    $("settings").open = true; // a wrong field must be seen
    wrong[0].focus();
  }
  return !wrong.length;
}

function checked(field) {
  const { validity, min, max, step } = field;
  const words =
    validity.badInput ? "Not a number" :
    validity.valueMissing ? "Needs a number" :
    validity.rangeOverflow ? `At most ${max}` :
    validity.rangeUnderflow ? `At least ${min}` :
    validity.stepMismatch ? (step ? `A multiple of ${step}` : "A whole number") : "";
  const label = field.parentElement;
  label.querySelector(".wrong")?.remove();
  field.removeAttribute("aria-describedby");
  field.setAttribute("aria-invalid", String(Boolean(words)));
  if (words) {
    const message = element("span", "wrong", words);
    message.id = `${field.id}-wrong`;
    field.setAttribute("aria-describedby", message.id);
    label.append(message);
  }
  return !words;
}

async function send() {
  if (state.running || !valid()) return;
  const running = new AbortController();
  state.running = running;
  $("stop").disabled = false;
  $("send").disabled = true;
  try {
    if (!state.models.length) await load();
    if (state.models.length) await generateAll(running.signal);
  } catch (error) {
    report(error);
  } finally {
    state.running = null;
    $("stop").disabled = true;
    $("send").disabled = false;
  }
}

async function generateAll(signal) {
  const chat = mode() === "chat";
  const text = $("prompt").value;
  const conversations = state.messages;
  if (chat) {
    if (!text.trim()) return;
    for (const messages of conversations) messages.push({ role: "user", content: text });
  }
  const all = state.models.map((_, index) => generate(index, signal));
  if (chat) $("prompt").value = "";
  if (narrow.matches) $("answers").scrollIntoView({ block: "nearest" });
  const answered = await Promise.all(all);
  // Nobody has to write a message again that was not answered.
  const lost = chat && !answered.includes(true) && state.messages === conversations;
  if (lost && !$("prompt").value) $("prompt").value = text;
}

function report(error) {
  $("facts").replaceChildren(element("span", "error", error.message));
}

function hideTip() {
  $("tip").hidden = true;
  document.querySelector("[aria-describedby='tip']")?.removeAttribute("aria-describedby");
}

function tip(event) {
  const span = event.target.closest?.(".token");
  hideTip();
  if (!span?.tokens) return;
  const box = $("tip");
  const table = element("table");
  const signs = { " ": "\u2423", "\n": "\u21b5", "\t": "\u21e5" };
  const visible = (text) => [...text].map((one) => signs[one] ?? JSON.stringify(one).slice(1, -1)).join("") || "(empty)";
  for (const token of span.tokens) {
    const rows = token.top.some(([text]) => text === token.text) ? token.top : [[token.text, token.logprob], ...token.top];
    for (const [text, logprob] of [...rows].sort((a, b) => b[1] - a[1])) {
      const row = element("tr", text === token.text ? "chosen" : "");
      const share = 100 * Math.exp(logprob);
      row.append(element("td", "", visible(text)), element("td", "", `${share.toFixed(share < 1 ? 2 : 1)} %`));
      table.append(row);
    }
  }
  box.replaceChildren(table);
  box.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const below = place.bottom + 6;
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${below + box.offsetHeight < innerHeight ? below : Math.max(4, place.top - box.offsetHeight - 6)}px`;
}

// Moves the focus to another token of the same text.
function move(event) {
  const span = event.target.closest?.(".token");
  if (!span || event.ctrlKey || event.altKey || event.metaKey) return;
  const all = [...span.parentElement.querySelectorAll(".token")].filter((one) => one.tokens);
  const at = all.indexOf(span);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  if (!all[next]) return;
  span.tabIndex = -1;
  all[next].tabIndex = 0;
  all[next].focus();
}

const narrow = matchMedia("(max-width: 56rem)");
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => {
  clear();
  $("prompt").focus();
});
$("key").addEventListener("change", () => load().catch(report));
$("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  $("prompt").focus(); // which the field notices as a change
});
for (const field of $("form").querySelectorAll(".grid input")) {
  field.addEventListener("input", () => checked(field));
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape") {
    if ($("tip").hidden) stop();
    hideTip();
  } else {
    move(event);
  }
});
for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, tip);
document.addEventListener("scroll", () => {
  // The focus may have moved to a token that had to be scrolled to.
  if (document.activeElement?.matches(".token")) tip({ target: document.activeElement });
  else hideTip();
}, true);
for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    const chat = mode() === "chat";
    $("prompt-label").textContent = chat ? "Message" : "Prompt";
    $("prompt").placeholder = chat ? "Hello" : "Once upon a time";
    $("send-word").textContent = chat ? "Send" : "Generate";
    $("system-field").hidden = !chat;
    clear();
  });
}
if (narrow.matches) $("settings").open = false;
load().catch(report);
