// Charges a fee of 0.5 % for every payout that was paid: an Express app as in Stripe's own guide. The
// official package checks the signature on the raw body. Only one thing is specific to Hapax: the
// `idempotency-key` of a request is the key of the fee. So a call that is repeated after a crash charges
// nothing again.
//
//   PORT                   where it listens, 3000 unless set
//   STRIPE_WEBHOOK_SECRET  the endpoint's secret
//   FEES_FILE              the ledger, fees.jsonl unless set: one line for each fee

import fs from "node:fs";
import express from "express";
import Stripe from "stripe";

const stripe = new Stripe("sk_test_unused");
const secret = process.env.STRIPE_WEBHOOK_SECRET ?? "whsec_example";
const ledger = openLedger(process.env.FEES_FILE ?? "fees.jsonl");
const app = express();

app.post("/hooks", express.raw({ type: "application/json" }), (request, response) => {
  let event;
  try {
    event = stripe.webhooks.constructEvent(request.body, request.headers["stripe-signature"], secret);
  } catch (error) {
    return response.status(400).send(`Webhook Error: ${error.message}`);
  }
  if (event.type !== "payout.paid") {
    return response.json({ result: "nothing to charge" });
  }
  const { id, amount } = event.data.object;
  const key = request.headers["idempotency-key"] ?? event.id;
  const fee = ledger.charge(key, id, amount);
  response.json({ result: `fee ${fee}` });
});

const server = app.listen(Number(process.env.PORT ?? 3000), "127.0.0.1", () => {
  console.log(`app ready: http://127.0.0.1:${server.address().port}/hooks`);
});

// The fees by their key. A fee is in the file, and synced, before the app answers.
function openLedger(path) {
  const file = fs.openSync(path, "a+");
  const text = fs.readFileSync(path, "utf8");
  // If the last line has no end, the app died while it wrote the line, and never answered with that fee.
  const whole = text.slice(0, text.lastIndexOf("\n") + 1);
  let bytes = Buffer.byteLength(whole);
  fs.ftruncateSync(file, bytes);
  const lines = whole.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const fees = new Map(lines.map((line) => [line.key, line.fee]));
  return {
    // Amounts are in minor units; half a unit is rounded up.
    charge(key, payout, amount) {
      if (!fees.has(key)) {
        const fee = Math.floor((amount * 5 + 500) / 1000);
        const line = JSON.stringify({ key, payout, amount, fee }) + "\n";
        // If an earlier line could not be written or synced, its call comes again, so the rest of that line
        // is removed.
        fs.ftruncateSync(file, bytes);
        fs.appendFileSync(file, line);
        fs.fsyncSync(file);
        bytes += Buffer.byteLength(line);
        fees.set(key, fee);
      }
      return fees.get(key);
    },
  };
}
