// An EventSource of a real browser follows an answer; its connection is cut in the middle.
// A proxy stands between both. It cuts the connection after some events, and notes with which
// event each connection goes on. The control drops that header: the text must then differ.

import { createServer, request } from "node:http";
import puppeteer from "puppeteer-core";

const gateway = new URL("http://127.0.0.1:10402");
const cutAfter = [1, 2];
const patience = 60000;
const page = "<!doctype html><title>follow</title>";

function proxy({ keepsLast }) {
  const seen = [];
  const server = createServer((asked, answer) => {
    if (!asked.url.startsWith("/v1/")) {
      answer.setHeader("Content-Type", "text/html");
      answer.end(page);
      return;
    }
    const headers = { ...asked.headers, host: gateway.host };
    seen.push(headers["last-event-id"] ?? null);
    if (!keepsLast) delete headers["last-event-id"];
    const cut = keepsLast || seen.length <= cutAfter.length ? cutAfter[seen.length - 1] : undefined;
    const options = { host: gateway.hostname, port: gateway.port, path: asked.url, headers };
    const sent = request(options, (got) => {
      answer.writeHead(got.statusCode, got.headers);
      let text = "";
      got.on("data", (part) => {
        text += part;
        const events = text.split("\n\n");
        if (cut === undefined || events.length <= cut) {
          answer.write(part);
          return;
        }
        // Whole events only, and then the connection is gone.
        const kept = events.slice(0, cut).join("\n\n").length + 2;
        answer.write(text.slice(text.length - part.length).slice(0, Math.max(0, kept - (text.length - part.length))), () => answer.destroy());
        got.destroy();
      });
      got.on("end", () => answer.end());
    });
    sent.on("error", () => answer.destroy());
    sent.end();
  });
  return new Promise((done) => server.listen(0, "127.0.0.1", () => done({ server, seen })));
}

async function follow(browser, id, { keepsLast }) {
  const { server, seen } = await proxy({ keepsLast });
  const tab = await browser.newPage();
  await tab.goto(`http://127.0.0.1:${server.address().port}/`);
  const text = await tab.evaluate(
    (path, limit) =>
      new Promise((done, fail) => {
        let text = "";
        const events = new EventSource(path);
        events.onmessage = ({ data }) => {
          if (data === "[DONE]") {
            events.close();
            done(text);
          } else text += JSON.parse(data).choices[0]?.text ?? "";
        };
        setTimeout(() => fail(new Error("no end")), limit);
      }),
    `/v1/requests/${id}/events`,
    patience,
  );
  await tab.close();
  server.close();
  return { text, seen };
}

const started = await fetch(new URL("/v1/completions", gateway), {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify({ model: "my-model", prompt: "12+34=", max_tokens: 40, seed: 7, ignore_eos: true }),
});
const whole = await started.json();
const browser = await puppeteer.launch({
  executablePath: "the-browser",
  args: ["--no-sandbox", "--disable-gpu"],
});
try {
  const { text, seen } = await follow(browser, whole.id, { keepsLast: true });
  const control = await follow(browser, whole.id, { keepsLast: false });
  const isResumed = seen.length === cutAfter.length + 1 && seen.slice(1).every(Boolean);
  if (!isResumed) throw new Error(`the browser came ${seen.length} times, after ${seen}`);
  if (text !== whole.choices[0].text) throw new Error(`the browser has ${JSON.stringify(text)}`);
  if (control.text === text) throw new Error("without the id of the last event nothing is repeated");
  console.log(`the same text after ${seen.length - 1} cuts, ${text.length} characters`);
} finally {
  await browser.close();
}
