// Charges the fee of one payout once, however often it runs, without a Hapax server.
//
//   node once.js PAYOUT_ID AMOUNT
//
// hapax.once claims the key inside this transaction. A second run waits for the first to commit and
// gets false. A run that dies before its commit has claimed nothing.
//
//   DATABASE_URL   postgres://payout_app@127.0.0.1/payouts unless set
//   DIE_AT         for experiments: the step at which this process kills itself

import { feeOf, openPool, step, transaction } from "./ledger.js";

const [payout, amount] = process.argv.slice(2);
if (!payout || !/^\d+$/.test(amount ?? "")) {
  console.error("usage: node once.js PAYOUT_ID AMOUNT");
  process.exit(2);
}

const pool = openPool();
const said = await transaction(pool, async (database) => {
  const { rows } = await database.query("SELECT hapax.once('payout-fees', $1) AS ours", [payout]);
  step("after once");
  if (!rows[0].ours) return "charged before";
  const fee = feeOf(amount);
  await database.query("INSERT INTO payout_fees (payout_id, amount, fee) VALUES ($1, $2, $3)", [
    payout,
    amount,
    fee,
  ]);
  step("before commit");
  return `fee ${fee}`;
});
step("after commit");
console.log(said);
await pool.end();
