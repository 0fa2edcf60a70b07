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
    const body = await response.json();
    return body.error?.message ?? String(body);
  } catch {
    return `status ${response.status}`;
  }
}

function counted(number) {
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (number >= size) return `${(number / size).toPrecision(3)}${unit}`;
  }
  return String(number);
}

async function load() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (response.status === 401) {
    $("facts").textContent = "This server needs an API key: enter it in the settings.";
    $("settings").open = true;
    $("key").placeholder = "needed";
    return;
  }
  if (!response.ok) throw new Error(await problem(response));
  state.models = (await response.json()).data;
  $("facts").replaceChildren();
  for (const model of state.models) {
    const f = model.facts;
    const line = element("div");
    line.append(element("b", "", model.id), ` ${f.family}, ${counted(f.parameters)} parameters, ` +
      `${f.layers} layers, ${f.positions} positions, ${f.tokenizer} of ${f.vocabulary.toLocaleString("en")} tokens, ` +
      `${f.precision} on ${f.device}, ${f.checkpoint}`);
    $("facts").append(line);
  }
  $("modes").hidden = !state.models.every((model) => model.facts.chat);
  document.title = `${state.models.map((model) => model.id).join(" / ")} - lmcore`;
  clear();
}

function mode() {
  return $("modes").hidden ? "text" : document.querySelector("input[name=mode]:checked").value;
}

function clear() {
  stop();
  state.messages = state.models.map(() => []);
  state.panels = state.models.map((model) => {
    const panel = element("article", "answer");
    if (state.models.length > 1) panel.append(element("h2", "", model.id));
    const body = element("div", "body");
    const status = element("div", "status");
    status.setAttribute("role", "status");
    body.append(element("p", "empty", "The text appears here, token by token. Point at a token to see its probability."));
    panel.append(body, status);
    return { panel, body, status };
  });
  $("answers").replaceChildren(...state.panels.map((one) => one.panel));
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
    model: state.models[index].id, max_tokens: number("max_tokens"), temperature: number("temperature"),
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

function show(place, text, tokens) {
  if (!text && !tokens.length) return;
  // The text of a part may lag behind its tokens within a character: the last token carries it.
  const span = element("span", "token", text);
  const last = tokens.at(-1);
  if (last) {
    span.style.background = `hsl(var(--tint) / ${(0.45 * (1 - Math.exp(last.logprob))).toFixed(3)})`;
    span.tokens = tokens;
    span.tabIndex = -1;
  }
  place.append(span);
}

async function generate(index, signal) {
  const { panel, body, status } = state.panels[index];
  panel.setAttribute("aria-busy", "true");
  const chat = mode() === "chat";
  if (!chat || !body.querySelector(".turn")) body.replaceChildren();
  if (chat) turn(body, "you", $("prompt").value);
  const place = turn(body, chat ? "model" : "", "");
  if (!chat) place.append(element("span", "prompt", $("prompt").value));
  const started = performance.now();
  let first = null, answer = "", usage = null, reason = null, count = 0;
  status.className = "status";
  status.textContent = "waiting ...";
  try {
    const [path, content] = request(index);
    const response = await fetch(path, {
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
      status.textContent = `${count} tokens ...`;
    }
    const words = { stop: "the model ended the text", length: "the length was reached" };
    const seconds = (performance.now() - first) / 1000;
    const speed = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    const wait = first === null ? "" : `, first after ${Math.round(first - started)} ms`;
    status.textContent = `${usage?.prompt_tokens ?? "?"} + ${usage?.completion_tokens ?? count} tokens${speed}${wait}; ` +
      `${words[reason] ?? "ended"}`;
  } catch (error) {
    if (error.name === "AbortError") {
      status.textContent = `${count} tokens; stopped`;
    } else {
      status.className = "status error";
      status.textContent = error.message;
    }
  } finally {
    panel.removeAttribute("aria-busy");
    if (chat && answer) state.messages[index].push({ role: "assistant", content: answer });
    else if (chat) state.messages[index].pop();
  }
}

function turn(body, who, text) {
  const made = element("div", "turn");
  if (who) made.append(element("div", "who", who));
  const place = element("div", "text", text);
  made.append(place);
  body.append(made);
  return place;
}

async function send() {
  if (state.running || !$("form").reportValidity()) return;
  if (!state.models.length) {
    await load().catch(report);
    if (!state.models.length) return;
  }
  if (mode() === "chat") {
    if (!$("prompt").value.trim()) return;
    for (const messages of state.messages) messages.push({ role: "user", content: $("prompt").value });
  }
  const running = new AbortController();
  state.running = running;
  $("stop").disabled = false;
  $("send").disabled = true;
  const all = state.models.map((_, index) => generate(index, running.signal));
  if (mode() === "chat") $("prompt").value = "";
  await Promise.all(all);
  state.running = null;
  $("stop").disabled = true;
  $("send").disabled = false;
}

function report(error) {
  $("facts").replaceChildren(element("span", "error", error.message));
}

function tip(event) {
  const span = event.target.closest?.(".token");
  const box = $("tip");
  if (!span?.tokens) {
    box.hidden = true;
    return;
  }
  const table = element("table");
  const visible = (text) => JSON.stringify(text).slice(1, -1);
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
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const below = place.bottom + 6;
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${below + box.offsetHeight < innerHeight ? below : Math.max(4, place.top - box.offsetHeight - 6)}px`;
}

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
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape") {
    stop();
  }
});
for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, tip);
document.addEventListener("scroll", () => { $("tip").hidden = true; }, true);
for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    const chat = mode() === "chat";
    $("prompt-label").textContent = chat ? "Message" : "Prompt";
    $("prompt").placeholder = chat ? "Hello" : "Once upon a time";
    $("system-field").hidden = !chat;
    clear();
  });
}
if (matchMedia("(max-width: 56rem)").matches) $("settings").open = false;
load().catch(report);
