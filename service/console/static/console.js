// Keeps an open page up to date, and adds shortcuts. Every page also works without it.
"use strict";

const main = document.querySelector("main");
const pulse = document.querySelector("[data-pulse]");
const pause = document.querySelector("[data-pause]");
const trouble = document.querySelector("[data-trouble]");
const output = document.querySelector("[data-output]");

// The most characters of an output that stay in the page.
const MOST_CHARACTERS = 200000;

let source = null;
let isPaused = false;

function tell(state, text) {
  pulse.className = `pulse ${state}`;
  pulse.textContent = text;
}

function showTrouble(text) {
  trouble.textContent = text;
  trouble.hidden = text === "";
}

// The focus of somebody who uses the keyboard must survive the change of a part.
function placeOfFocus(part) {
  const focused = document.activeElement;
  if (!part.contains(focused)) return null;
  const kind = focused.tagName.toLowerCase();
  const key = focused.id || focused.getAttribute("href") || focused.getAttribute("aria-label");
  return { kind, key };
}

function giveFocusBack(part, place) {
  if (place === null || place.key === null) return;
  for (const one of part.querySelectorAll(place.kind)) {
    const key = one.id || one.getAttribute("href") || one.getAttribute("aria-label");
    if (key === place.key) {
      one.focus({ preventScroll: true });
      return;
    }
  }
}

function isFilledIn(field) {
  if (field.type === "checkbox") return field.checked !== field.defaultChecked;
  if (field.tagName === "SELECT") return [...field.options].some((one) => one.selected !== one.defaultSelected);
  return field.value !== field.defaultValue;
}

function isBeingUsed(part) {
  const focused = document.activeElement;
  const isTyping = focused !== null && focused.matches("input, select, textarea");
  const isChanged = [...part.querySelectorAll("input, select, textarea")].some(isFilledIn);
  const selection = document.getSelection();
  const isSelecting = selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
  return (isTyping && part.contains(focused)) || isChanged || isSelecting;
}

function showPart(html) {
  const part = document.getElementById("live");
  if (isBeingUsed(part)) {
    tell("off", "Waits for you: a form or a selection is in use");
    return;
  }
  tell("", "Up to date");
  const place = placeOfFocus(part);
  const scrolled = [...part.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const opened = [...part.querySelectorAll("details[open]")].map((one) => one.id);
  part.innerHTML = html;
  part.querySelectorAll(".scroll").forEach((one, number) => {
    one.scrollLeft = scrolled[number] || 0;
  });
  for (const id of opened) {
    const details = document.getElementById(id);
    if (details !== null) details.open = true;
  }
  giveFocusBack(part, place);
}

function addText(text) {
  const isAtEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  output.append(text);
  const most = output.textContent.length - MOST_CHARACTERS;
  if (most > 0) output.textContent = `…${output.textContent.slice(most)}`;
  output.normalize();
  if (isAtEnd) output.scrollTop = output.scrollHeight;
}

function connect() {
  if (source !== null || isPaused || document.hidden) return;
  const address = new URL(location.href);
  if (main.dataset.seen !== undefined) address.searchParams.set("seen", main.dataset.seen);
  source = new EventSource(address);
  source.addEventListener("open", () => tell("", "Up to date"));
  source.addEventListener("error", () => {
    const isRefused = source !== null && source.readyState === EventSource.CLOSED;
    tell("lost", isRefused ? "Not kept up to date" : "Connecting again…");
    if (isRefused) disconnect();
  });
  source.addEventListener("part", (event) => {
    showTrouble("");
    showPart(JSON.parse(event.data).html);
  });
  source.addEventListener("trouble", (event) => showTrouble(JSON.parse(event.data).text));
  source.addEventListener("reset", () => {
    output.textContent = "";
    main.dataset.seen = "0";
  });
  source.addEventListener("text", (event) => {
    main.dataset.seen = event.lastEventId;
    addText(JSON.parse(event.data).text);
  });
}

function disconnect() {
  if (source === null) return;
  source.close();
  source = null;
}

function setPaused(value) {
  isPaused = value;
  pause.setAttribute("aria-pressed", String(isPaused));
  pause.textContent = isPaused ? "Continue updates" : "Pause updates";
  if (isPaused) {
    disconnect();
    tell("off", "Paused");
  } else {
    connect();
  }
}

function keepUpToDate() {
  pulse.hidden = false;
  pause.hidden = false;
  tell("off", "Connecting…");
  pause.addEventListener("click", () => setPaused(!isPaused));
  // Browsers open few connections to one host: a tab that nobody sees must not keep one.
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", connect);
  connect();
}

// Shortcuts.

const help = document.querySelector("[data-help]");
const toggle = document.querySelector("[data-keys-on]");

function haveShortcuts() {
  try {
    return localStorage.getItem("shortcuts") !== "off";
  } catch {
    return true;
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.target.closest("input, select, textarea, dialog") || !haveShortcuts()) return;
  const link = /^[1-9]$/.test(event.key) && document.querySelector(`.menu [data-key="${event.key}"]`);
  if (link) link.click();
  else if (event.key === "/") document.querySelector("[data-find]").focus();
  else if (event.key === "p" && !pause.hidden) setPaused(!isPaused);
  else if (event.key === "?") help.showModal();
  else return;
  event.preventDefault();
}

function addShortcuts() {
  const button = document.querySelector("[data-keys]");
  button.hidden = false;
  button.addEventListener("click", () => help.showModal());
  toggle.checked = haveShortcuts();
  toggle.addEventListener("change", () => {
    try {
      localStorage.setItem("shortcuts", toggle.checked ? "on" : "off");
    } catch {
      // Storage may be forbidden; then shortcuts stay on.
    }
  });
  document.addEventListener("keydown", onKey);
}

// Forms that cannot be undone ask first.
document.addEventListener("submit", (event) => {
  const button = event.submitter;
  const question = (button && button.dataset.confirm) || event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});

// On a phone the menu is wider than the screen.
document.querySelector(".menu [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

if (help !== null) addShortcuts();
if (main.dataset.live !== undefined) keepUpToDate();
if (output !== null) output.scrollTop = output.scrollHeight;
