// Receives the deliveries of Hapax and records each paid invoice once.
//
// The official standardwebhooks package verifies each delivery. A delivery can come more than once: its
// answer was lost, or the sender died before it recorded the answer. Every copy has the same webhook-id.
// So that id and the effect are one line of a file: both are written, or neither.
//
//   PORT             where it listens, 3000 unless set
//   WEBHOOK_SECRET   the endpoint's secret, the one of the README unless set
//   INVOICES_FILE    where invoices are recorded, invoices.jsonl unless set: one line for each
//   DIE_AT           for experiments: the step at which this process kills itself

import fs from "node:fs";
import http from "node:http";
import { Webhook, WebhookVerificationError } from "standardwebhooks";

const secret = process.env.WEBHOOK_SECRET ?? "whsec_YSByZWNlaXZlciBpbiBOb2RlLmpzLCBmb3Igc2hvdyE=";
// 1 MiB, the most data of a message, and 4 KiB for the rest of the body.
const bodyBytesMax = 1024 * 1024 + 4096;
const webhook = new Webhook(secret);
const invoices = openInvoices(process.env.INVOICES_FILE ?? "invoices.jsonl");

// The status and the answer.
function handle(headers, body) {
  let message;
  try {
    message = webhook.verify(body, headers);
  } catch (error) {
    if (!(error instanceof WebhookVerificationError || error instanceof SyntaxError)) throw error;
    return [401, `not verified: ${error.message}`];
  }
  // A 2xx, because the sender would retry after any other answer.
  if (message.type !== "invoice.paid") return [200, "nothing to record"];
  return [200, invoices.record(headers["webhook-id"], message.data)];
}

// The invoices by the message that reported them. An invoice is in the file, and synced, before the app
// answers.
function openInvoices(path) {
  const file = fs.openSync(path, "a+");
  const text = fs.readFileSync(path, "utf8");
  // If the last line has no end, the app died while it wrote the line, and never answered for that invoice.
  const whole = text.slice(0, text.lastIndexOf("\n") + 1);
  let bytes = Buffer.byteLength(whole);
  fs.ftruncateSync(file, bytes);
  const lines = whole.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const seen = new Set(lines.map((line) => line.message));
  return {
    record(message, { id, amount }) {
      if (seen.has(message)) return "recorded before";
      step("before write");
      const line = JSON.stringify({ message, invoice: id, amount }) + "\n";
      // If an earlier line could not be written or synced, its invoice comes again, so the rest of that line
      // is removed.
      fs.ftruncateSync(file, bytes);
      fs.appendFileSync(file, line);
      fs.fsyncSync(file);
      bytes += Buffer.byteLength(line);
      step("after write");
      seen.add(message);
      return "recorded";
    },
  };
}

// Kills the process if DIE_AT names this step.
function step(name) {
  if (process.env.DIE_AT !== name) return;
  process.kill(process.pid, "SIGKILL");
  // The signal is on its way; nothing else may happen until it arrives.
  for (;;);
}

const server = http.createServer(async (request, response) => {
  const answer = (status, text) =>
    response
      .writeHead(status, { "content-type": "text/plain", "content-length": Buffer.byteLength(text) })
      .end(text);
  try {
    const parts = [];
    let bytes = 0;
    for await (const part of request) {
      bytes += part.length;
      if (bytes > bodyBytesMax) return answer(413, "too large").destroy();
      parts.push(part);
    }
    if (request.method !== "POST" || request.url !== "/in") return answer(404, "POST /in");
    answer(...handle(request.headers, Buffer.concat(parts)));
  } catch {
    // The caller hung up in the middle of its request, or the file could not be written: without an answer
    // the delivery comes again.
    response.destroy();
  }
});
server.listen(Number(process.env.PORT ?? 3000), "127.0.0.1", () => {
  console.log(`app ready: http://127.0.0.1:${server.address().port}`);
});
