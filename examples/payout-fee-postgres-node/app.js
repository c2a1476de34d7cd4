// Charges a fee of 0.5 % for every payout that was paid, in PostgreSQL, exactly once.
//
// Hapax posts each event here, signed as Standard Webhooks, with the job and the fence of its claim
// in two headers. The fee, a message about it and the job's "done" are one transaction of this app:
// all three commit, or none. So the ledger needs no unique constraint. The process may die at any
// point, a request may be repeated, and an answer may be lost.
//
//   DATABASE_URL   postgres://payout_app@127.0.0.1/payouts unless set
//   HOOK_SECRET    the secret that signs requests from Hapax
//   PORT           where it listens, 3000 unless set; 0 picks a free one
//   DIE_AT         for experiments: the step at which this process kills itself

import http from "node:http";
import crypto from "node:crypto";
import { feeOf, openPool, step, transaction } from "./ledger.js";

const secret = process.env.HOOK_SECRET ?? "whsec_cGF5b3V0IGZlZXMgaW4gYSBib29r";
const toleranceSeconds = 300;
const bodyBytesMax = 1024 * 1024;

// hapax.complete raises this if another attempt has the job, or if the job is already done.
const fenceLost = "XH001";

const pool = openPool();

// The status and the text of the answer.
async function handle(headers, body) {
  if (!isSigned(headers, body)) return [401, "not signed by Hapax"];
  const payout = readPayout(body);
  // The fence stays text: it is a bigint, and only the database needs its value.
  const [job, fence] = [headers["hapax-job"], headers["hapax-fence"]];
  if (!payout || !job || !fence) return [422, "not a payout"];
  try {
    return [200, await charge(payout, job, fence)];
  } catch (error) {
    // Everything was rolled back. Hapax reads the job again, so the answer does not matter.
    if (error.code === fenceLost) return [409, "another attempt holds this job, or the job is done"];
    return [503, "the database failed; the fee was charged completely or not at all"];
  }
}

// The work and its "done", in one transaction.
async function charge(payout, job, fence) {
  const fee = feeOf(payout.amount);
  const result = `fee ${fee}`;
  step("before begin");
  await transaction(pool, async (database) => {
    await database.query("INSERT INTO payout_fees (payout_id, amount, fee) VALUES ($1, $2, $3)", [
      payout.id,
      payout.amount,
      fee,
    ]);
    step("after insert");
    await database.query("SELECT hapax.complete($1, $2, $3)", [job, fence, result]);
    step("after complete");
    // The message is published last, because its key is locked until the commit.
    await database.query("SELECT hapax.publish('fee.charged', $1, key => $2)", [
      { payout: payout.id, fee },
      payout.id,
    ]);
    step("before commit");
  });
  step("after commit");
  return result;
}

function readPayout(body) {
  try {
    const payout = JSON.parse(body).data.object;
    const isAmount = Number.isSafeInteger(payout.amount) && payout.amount >= 0;
    return isAmount && typeof payout.id === "string" ? payout : undefined;
  } catch {
    return undefined;
  }
}

// Standard Webhooks: HMAC-SHA256 over id, time and body; any one signature must match.
function isSigned(headers, body) {
  const stamp = headers["webhook-timestamp"] ?? "";
  const age = Math.abs(Date.now() / 1000 - Number(stamp));
  if (!/^\d+$/.test(stamp) || age > toleranceSeconds) return false;
  const hmac = crypto.createHmac("sha256", Buffer.from(secret.replace(/^whsec_/, ""), "base64"));
  hmac.update(`${headers["webhook-id"]}.${stamp}.`).update(body);
  const expected = Buffer.from(`v1,${hmac.digest("base64")}`);
  const given = (headers["webhook-signature"] ?? "").split(" ").map((one) => Buffer.from(one));
  return given.some(
    (one) => one.length === expected.length && crypto.timingSafeEqual(one, expected),
  );
}

const server = http.createServer(async (request, response) => {
  const answer = (status, text) =>
    response.writeHead(status, { "content-type": "text/plain" }).end(text);
  try {
    const parts = [];
    let bytes = 0;
    for await (const part of request) {
      bytes += part.length;
      if (bytes > bodyBytesMax) return answer(413, "too large").destroy();
      parts.push(part);
    }
    if (request.method !== "POST" || request.url !== "/hooks") return answer(404, "POST /hooks");
    answer(...(await handle(request.headers, Buffer.concat(parts))));
  } catch {
    // The caller hung up in the middle of its request: there is no connection for an answer.
    response.destroy();
  }
});
server.listen(Number(process.env.PORT ?? 3000), "127.0.0.1", () => {
  console.log(`app ready: http://127.0.0.1:${server.address().port}/hooks`);
});
