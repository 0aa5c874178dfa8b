// Opens the pages of a console in Chromium; prints what was found as one line of JSON.
// The argument is JSON: see `browse` in tests/console/__main__.py.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import puppeteer from "puppeteer-core";

const asked = JSON.parse(process.argv[2]);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
const PATIENCE = 15000;

const done = [];
const faults = [];

const browser = await puppeteer.launch({
  executablePath: asked.browser,
  args: ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"],
});

// A page that notes everything that a console of a browser shows as an error.
async function open(path, { scheme = "light", width = 1280, url = asked.writing } = {}) {
  const page = await browser.newPage();
  page.troubles = [];
  page.on("console", (message) => {
    if (["error", "warn"].includes(message.type())) page.troubles.push(message.text());
  });
  page.on("pageerror", (error) => page.troubles.push(`page error: ${error.message}`));
  page.on("requestfailed", (request) => {
    // A page that is left ends its stream.
    if (request.resourceType() !== "eventsource") page.troubles.push(`failed: ${request.url()}`);
  });
  page.on("dialog", (dialog) => dialog.accept());
  await page.setViewport({ width, height: 900 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.goto(url + path, { waitUntil: "load" });
  return page;
}

async function isUpToDate(page) {
  await page.waitForFunction(
    () => document.querySelector("[data-pulse]")?.textContent === "Up to date",
    { timeout: PATIENCE },
  );
}

// A page whose parts stay: an update would replace what is about to be clicked.
async function openPaused(path, options) {
  const page = await open(path, options);
  await isUpToDate(page);
  await page.keyboard.press("p");
  return page;
}

// Not through the page's own scripts, which its policy would refuse, but through the debugger.
async function violations(page) {
  await page.evaluate(axe);
  const result = await page.evaluate((tags) => axe.run(document, { runOnly: tags }), RULES);
  return result.violations.map((one) => `${one.id} (${one.nodes.length}): ${one.nodes[0].target} ${one.nodes[0].failureSummary}`);
}

// The labels of plots that are not wholly inside of their picture.
function cutTicks(page) {
  return page.$$eval(".tick", (ticks) => ticks.filter((one) => {
    const [inner, outer] = [one.getBoundingClientRect(), one.ownerSVGElement.getBoundingClientRect()];
    return inner.left < outer.left || inner.right > outer.right || inner.bottom > outer.bottom + 1;
  }).map((one) => one.textContent));
}

function check(isGood, what) {
  (isGood ? done : faults).push(what);
}

async function attempt(what, test) {
  try {
    await test();
    done.push(what);
  } catch (error) {
    faults.push(`${what}: ${error.message}`);
  }
}

function expect(isGood, what) {
  if (!isGood) throw new Error(what);
}

function nameOf(path, scheme, width) {
  const name = path.replace("/queues/default", "").replace(/[^a-z0-9]+/gi, "-") || "-overview";
  return `${asked.folder}/page${name}-${scheme}-${width}.png`;
}

for (const scheme of ["light", "dark"]) {
  for (const path of asked.paths) {
    await attempt(`${scheme} ${path}`, async () => {
      const page = await open(path, { scheme });
      const isThere = !path.endsWith("/nobody");
      if (isThere) await isUpToDate(page);
      const found = await violations(page);
      expect(found.length === 0, found.join("; "));
      // The browser itself reports a page that is not found.
      const troubles = page.troubles.filter((one) => isThere || !one.includes("404"));
      expect(troubles.length === 0, troubles.join("; "));
      expect((await page.title()).endsWith("Quire"), "a text of the queue was run");
      expect((await page.$$("main script, main img")).length === 0, "a text became an element");
      await page.screenshot({ path: nameOf(path, scheme, 1280), fullPage: true });
      await page.close();
    });
  }
}

for (const path of asked.paths) {
  await attempt(`narrow ${path}`, async () => {
    const page = await open(path, { width: 390 });
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    expect(wide <= 390, `the page is ${wide} wide`);
    expect((await cutTicks(page)).length === 0, `cut off: ${await cutTicks(page)}`);
    const broken = await page.$$eval("table .id", (all) => all.filter((one) => one.offsetHeight > 24).map((one) => one.textContent));
    expect(broken.length === 0, `ids on several lines: ${broken}`);
    await page.screenshot({ path: nameOf(path, "light", 390), fullPage: true });
    await page.close();
  });
}

await attempt("an output grows on an open page", async () => {
  const page = await open(asked.following);
  const count = (grown) => document.querySelector("[data-output]").textContent.split(grown).length;
  const before = await page.evaluate(count, asked.grown);
  await page.waitForFunction(
    (grown, least) => document.querySelector("[data-output]").textContent.split(grown).length > least,
    { timeout: PATIENCE },
    asked.grown,
    before + 3,
  );
  await page.close();
});

await attempt("updates can be paused by the keyboard, and go on", async () => {
  const page = await open("/queues/default/workers");
  await isUpToDate(page);
  await page.keyboard.press("p");
  const paused = await page.$eval("[data-pause]", (one) => one.getAttribute("aria-pressed"));
  expect(paused === "true", "it is not paused");
  await page.keyboard.press("p");
  await isUpToDate(page);
  await page.close();
});

await attempt("shortcuts lead to pages, to the search and to their list", async () => {
  const page = await open("/queues/default");
  await page.keyboard.press("?");
  expect(await page.$eval("dialog", (one) => one.open), "the list is not open");
  const found = await violations(page);
  expect(found.length === 0, found.join("; "));
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => !document.querySelector("dialog").open, { timeout: PATIENCE });
  await page.keyboard.press("/");
  await page.waitForFunction(() => document.activeElement.name === "id", { timeout: PATIENCE });
  await page.keyboard.press("2");
  expect(page.url().endsWith("/queues/default"), "a key in a field is no shortcut");
  await page.evaluate(() => document.activeElement.blur());
  await Promise.all([page.waitForNavigation(), page.keyboard.press("2")]);
  expect(page.url().endsWith("/requests"), page.url());
  await page.close();
});

await attempt("the first stop of the keyboard leads over the menu, and stays in sight", async () => {
  const page = await open("/queues/default/limits");
  await page.keyboard.press("Tab");
  const skip = await page.evaluate(() => document.activeElement.getBoundingClientRect().left >= 0
    && document.activeElement.className);
  expect(skip === "skip", `the first stop is ${skip}`);
  await page.keyboard.press("Enter");
  expect(await page.evaluate(() => document.activeElement.id === "main"), "it leads nowhere");
  await page.close();
});

await attempt("the focus survives a change of the page", async () => {
  const page = await open("/queues/default/requests");
  await isUpToDate(page);
  await page.focus(".tabs a");
  await page.evaluate(() => { document.querySelector("#live h1").textContent = "stale"; });
  await page.waitForFunction(() => document.querySelector("#live h1").textContent === "Requests", { timeout: PATIENCE });
  expect(await page.evaluate(() => document.activeElement.matches(".tabs a")), "it is lost");
  await page.close();
});

await attempt("what somebody types is not replaced", async () => {
  const page = await open("/queues/default");
  await isUpToDate(page);
  await page.type("input[name=reason]", "half a sent");
  await page.waitForFunction(() => document.querySelector("[data-pulse]").textContent.startsWith("Waits"), { timeout: PATIENCE });
  expect(await page.$eval("input[name=reason]", (one) => one.value) === "half a sent", "it is gone");
  await page.close();
});

await attempt("an operator pauses and resumes, and reads what was done", async () => {
  const page = await open("/queues/default");
  await page.type("input[name=reason]", "repairs");
  await Promise.all([page.waitForNavigation(), page.click("form[action$='/pause'] button")]);
  expect((await page.$eval(".notice", (one) => one.textContent)).startsWith("The queue is paused"), "no notice");
  expect((await page.$eval(".banner", (one) => one.textContent)).includes("repairs"), "no reason");
  const found = await violations(page);
  expect(found.length === 0, found.join("; "));
  await page.screenshot({ path: nameOf("/paused", "light", 1280), fullPage: true });
  await Promise.all([page.waitForNavigation(), page.click("form[action$='/resume'] button")]);
  expect((await page.$$(".banner.warn")).length === 0, "it is still paused");
  expect(page.troubles.length === 0, page.troubles.join("; "));
  await page.close();
});

for (const [scheme, width] of [["light", 1280], ["dark", 1280], ["light", 390]]) {
  await attempt(`a filter is filled in and is in the address, ${scheme} ${width}`, async () => {
    const page = await openPaused("/queues/default/requests?state=ended", { scheme, width });
    await page.click("#filter summary");
    const found = await violations(page);
    expect(found.length === 0, found.join("; "));
    expect((await page.evaluate(() => document.documentElement.scrollWidth)) <= width, "it is too wide");
    await page.select("#status", "failed");
    await page.type("#tenant", "globex");
    await page.screenshot({ path: nameOf("/filter", scheme, width) });
    await Promise.all([page.waitForNavigation(), page.click("#filter button")]);
    expect(page.url().endsWith("?state=ended&status=failed&tenant=globex"), page.url());
    const tenants = await page.$$eval("tbody td:nth-child(5)", (all) => all.map((one) => one.textContent));
    expect(tenants.length > 0 && tenants.every((one) => one === "globex"), `it lists ${tenants}`);
    expect(page.troubles.length === 0, page.troubles.join("; "));
    await page.close();
  });
}

await attempt("the tile of failures leads to their list", async () => {
  const page = await openPaused("/queues/default");
  // Anywhere in the tile.
  const tile = await page.evaluateHandle(() => [...document.querySelectorAll(".tile")].find((one) => one.textContent.includes("Failed, last hour")));
  await Promise.all([page.waitForNavigation(), tile.asElement().click()]);
  expect(page.url().endsWith("?state=ended&status=failed&within=1h"), page.url());
  await page.close();
});

await attempt("an operator cancels a large group in parts", async () => {
  const page = await openPaused(asked.group);
  await Promise.all([page.waitForNavigation({ timeout: PATIENCE }), page.click("form[action$='/cancel-group'] button")]);
  const notice = await page.$eval(".notice", (one) => one.textContent);
  expect(notice.startsWith("The cancel of 2,000 requests was accepted. 8,000 more are open"), notice);
  await page.screenshot({ path: nameOf("/cancelled", "light", 1280) });
  await page.close();
});

await attempt("an observer has no forms that change something", async () => {
  const page = await open("/queues/default/dead", { url: asked.reading });
  expect((await page.$$("form[method=post]")).length === 0, "there is one");
  await page.close();
});

await attempt("without scripts a page shows one state", async () => {
  const page = await browser.newPage();
  await page.setJavaScriptEnabled(false);
  await page.goto(asked.writing + "/queues/default");
  expect((await page.content()).includes("Without JavaScript"), "it does not say so");
  await page.close();
});

// A page of another site that sends a form as soon as it is opened.
const evil = createServer((_, response) => {
  response.setHeader("Content-Type", "text/html");
  response.end(`<!doctype html><form method="post" action="${asked.writing}/queues/default/actions/pause">
    <input name="reason" value="owned"><input name="token" value=""></form>
    <script>document.forms[0].submit()</script>`);
});
await new Promise((resolve) => evil.listen(0, "127.0.0.1", resolve));
await attempt("a form of another site is refused", async () => {
  const page = await browser.newPage();
  const answer = page.waitForResponse((one) => one.url().endsWith("/actions/pause"), { timeout: PATIENCE });
  await page.goto(`http://localhost:${evil.address().port}/`).catch(() => {});
  expect((await answer).status() === 403, `it is answered with ${(await answer).status()}`);
  await page.close();
});
evil.close();

// Controls: what is planted on a page must be found.
{
  const page = await open("/queues/default/workers");
  await page.evaluate(() => {
    document.querySelector("main").insertAdjacentHTML("beforeend",
      "<img src='/static/icon.svg'><p style='color:#999;background:#aaa'>faint</p><b onclick='x()'>x</b>");
    console.error("planted");
  });
  const found = (await violations(page)).join("; ");
  check(found.includes("image-alt"), "control: axe finds a picture without a text");
  check(page.troubles.includes("planted"), "control: an error of the browser's console is noted");
  check(page.troubles.some((one) => one.includes("Content Security Policy")),
    "control: the policy refuses a style and a handler in the page");
  await page.evaluate(() => { document.querySelector("main").insertAdjacentHTML("beforeend", "<hr>"); document.querySelector("hr").setAttribute("width", "2000"); });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  check(wide, "control: a page that is too wide is noticed");
  await page.close();
}
{
  const page = await openPaused("/queues/default", { width: 390 });
  await page.evaluate(() => { document.querySelector(".tick").textContent = "1000000000"; });
  check((await cutTicks(page)).length === 1, "control: a label that is cut off is noticed");
  await page.close();
}

await browser.close();
console.log(JSON.stringify({ done, faults }));
